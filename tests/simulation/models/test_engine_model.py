"""The engine in closed form against one that goes token by token, on random workloads."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.hardware import CONSTANTS, gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.step_time import StepCosts

MODEL, GPU = language_model("Qwen2.5-7B"), gpu("H800")


class Request:
    def __init__(self, id, prompt, done, total, pauses, prefix):
        self.id, self.prompt, self.done, self.total = id, prompt, done, total
        self.pauses = [pause for pause in pauses if pause[0] > done]
        self.prefix = prefix
        self.pause_end = None


class TokenByToken:
    """What RooflineEngine promises, written the slow and plain way: one decode step at a time, sums from scratch."""

    def __init__(self, max_running, capacity):
        self.costs = StepCosts(MODEL, GPU, 1, CONSTANTS)
        self.max_running, self.capacity = max_running, capacity
        self.running, self.paused, self.waiting = [], [], []
        self.leaving = []  # removed in mid-step: still in that step
        self.finished = []
        self.time = 0.0
        self.op_end = None  # end of the prefill or step under way
        self.wake = math.inf  # when to look again if there is none
        self.batch = []
        self.decode_s = self.prefill_s = 0.0
        self.generated = self.preemptions = 0
        self.kv_integral = 0.0
        self.level, self.level_since = 0, 0.0
        self.peak = 0

    def kv_used(self):
        holders = self.running + self.paused + self.leaving
        own = sum(request.done + (0 if request.prefix else request.prompt) for request in holders)
        return own + sum({request.prefix: request.prompt for request in holders if request.prefix}.values())

    def run_until(self, now, including_now=True):
        while True:
            time = self.op_end
            if time is None:
                time = min([self.wake, *(request.pause_end for request in self.paused)])
            if time > now or (time == now and not including_now):
                return
            self.time, self.op_end, self.wake = time, None, math.inf
            self.kv_integral += self.level * (time - self.level_since)
            self.operate(time)
            self.level, self.level_since = self.kv_used(), time

    def operate(self, time):
        """End the operation under way, begin the next if there is one."""
        for request in self.batch:
            request.done += 1
            self.generated += request not in self.leaving
        self.batch = []
        self.leaving = []
        for request in list(self.running):
            if request.done >= request.total:
                self.running.remove(request)
                self.finished.append((request.id, request.done, time))
            elif request.pauses and request.pauses[0][0] <= request.done:
                self.running.remove(request)
                request.pause_end = time + request.pauses.pop(0)[1]
                self.paused.append(request)
        for request in sorted(self.paused, key=lambda request: request.pause_end):
            if request.pause_end <= time:
                self.paused.remove(request)
                self.running.append(request)
        prefill = 0.0
        while self.waiting and len(self.running) + len(self.paused) < self.max_running:
            request = self.waiting[0]
            shared = request.prefix and request.prefix in {r.prefix for r in self.running + self.paused}
            new = request.done + (0 if shared else request.prompt)
            if self.kv_used() + new + len(self.running) + 1 > self.capacity:
                break
            self.waiting.pop(0)
            self.running.append(request)
            prefill += self.costs.prefill_seconds(new, request.prompt + request.done - new)
        if prefill:
            self.op_end = time + prefill
            self.prefill_s += prefill
            return
        while self.running and self.kv_used() + len(self.running) > self.capacity:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        self.peak = max(self.peak, self.kv_used())
        if not self.running:
            return
        self.batch = list(self.running)
        attended = sum(request.prompt + request.done for request in self.batch)
        seconds = self.costs.steps(len(self.batch), attended).seconds(1)
        self.op_end = time + seconds
        self.decode_s += seconds

    def add(self, now, request):
        self.run_until(now, including_now=False)
        self.waiting.append(request)
        self.look_again(now)

    def look_again(self, now):
        if self.op_end is None:
            self.wake = min(self.wake, now)

    def remove(self, now, id):
        self.run_until(now)
        for requests in (self.running, self.paused, self.waiting):
            for request in requests:
                if request.id == id:
                    requests.remove(request)
                    if requests is not self.waiting and self.op_end is not None:
                        self.leaving.append(request)
                    self.look_again(now)
                    return request.done
        return None


def engine(max_running=64, capacity=None, **kwargs):
    return RooflineEngine(MODEL, GPU, 1, max_running, kv_capacity_tokens=capacity, **kwargs)


def drain(engine, now=0.0):
    """All that finishes without further calls."""
    finished = engine.advance(now)
    while (event := engine.next_event(now)) is not None:
        now = event
        finished += engine.advance(now)
    return finished


def random_workload(seed):
    rng = random.Random(seed)
    capacity = rng.choice([600, 1500, 5000, 100_000])
    max_running = rng.choice([1, 2, 5, 16, 64])
    calls, now = [], 0.0
    for index in range(rng.randint(1, 40)):
        now += rng.choice([0.0, 0.0, rng.expovariate(20), rng.expovariate(1)])
        if index and rng.random() < 0.2:
            calls.append((now + rng.random() * 1e-3, "remove", f"t{rng.randrange(index)}"))
            now = calls[-1][0]
            continue
        total = rng.randint(1, 300)
        prompt = rng.randint(1, 250)
        prefix = f"p{rng.randrange(4)}" if rng.random() < 0.5 else None
        if prefix:
            prompt = 50 + 40 * int(prefix[1:])
        done = rng.choice([0, 0, rng.randrange(total)])
        ends = sorted(rng.sample(range(1, 300), rng.choice([0, 0, 1, 3])))
        pauses = tuple((end, rng.expovariate(1.0)) for end in ends if end < total)
        calls.append((now, "add", (f"t{index}", prompt, done, total, pauses, prefix)))
    return capacity, max_running, calls


def check_same(seed):
    """Returns the engine's statistics."""
    capacity, max_running, calls = random_workload(seed)
    fast, slow = engine(max_running, capacity), TokenByToken(max_running, capacity)
    rng = random.Random(seed)
    got = []
    for now, call, what in calls:
        if call == "add":
            id, prompt, done, total, pauses, prefix = what
            fast.add(
                now,
                id,
                prompt_tokens=prompt,
                done_tokens=done,
                remaining_tokens=total - done,
                pauses=pauses,
                prefix_key=prefix,
            )
            slow.add(now, Request(*what))
        else:
            assert fast.remove(now, what) == slow.remove(now, what)
            if rng.random() < 0.5:
                got += fast.advance(now)
                assert fast.progress_all(now) == {
                    request.id: request.done
                    for request in sorted(
                        slow.running + slow.paused + slow.waiting, key=lambda request: int(request.id[1:])
                    )
                }
    got += drain(fast, now)
    slow.run_until(1e6)
    assert [(one.trajectory_id, one.tokens) for one in got] == [(id, tokens) for id, tokens, _ in slow.finished]
    assert [one.time for one in got] == pytest.approx([time for _, _, time in slow.finished], rel=1e-9)
    seen = fast.statistics(1e6)
    assert seen.decode_seconds == pytest.approx(slow.decode_s, rel=1e-9)
    assert seen.prefill_seconds == pytest.approx(slow.prefill_s, rel=1e-9)
    assert seen.generated_tokens == slow.generated
    assert seen.kv_token_seconds == pytest.approx(slow.kv_integral, rel=1e-9)
    assert seen.preemptions == slow.preemptions
    assert slow.peak <= capacity
    return seen


@pytest.mark.parametrize("block", range(10))
def test_same_as_token_by_token(block):
    seen = [check_same(seed) for seed in range(20 * block, 20 * block + 20)]
    # The workloads must reach what is hard: KV overflow, and all trajectories in tool calls at once.
    assert sum(statistics.preemptions for statistics in seen) > 10
    assert sum(statistics.environment_seconds for statistics in seen) > 1


@settings(max_examples=100, derandomize=True)
@given(st.integers(min_value=1000, max_value=10**9))
def test_same_as_token_by_token_for_any_seed(seed):
    check_same(seed)


def test_refilling_at_the_time_of_an_event_is_the_same_too():
    """The usual caller: whenever one finishes, the next is added at that very time."""
    fast, slow = engine(4, 2000), TokenByToken(4, 2000)
    rng = random.Random(5)
    requests = [(f"t{i}", rng.randint(5, 200), 0, rng.randint(1, 400), (), None) for i in range(60)]
    for what in requests[:4]:
        fast.add(0.0, what[0], prompt_tokens=what[1], remaining_tokens=what[3])
        slow.add(0.0, Request(*what))
    got, left, seen = [], requests[4:], 0
    while (event := fast.next_event(got[-1].time if got else 0.0)) is not None:
        got += fast.advance(event)
        slow.run_until(event + 1e-9)
        while seen < len(got) and left:
            seen += 1
            what = left.pop(0)
            # A hair later: the step that begins at this time has begun.
            fast.add(event + 1e-9, what[0], prompt_tokens=what[1], remaining_tokens=what[3])
            slow.add(event + 1e-9, Request(*what))
    assert len(got) == 60
    assert [one.time for one in got] == pytest.approx([time for _, _, time in slow.finished], rel=1e-9)


def test_members_of_a_group_added_together_are_admitted_together():
    fast = engine()
    for member in range(16):
        fast.add(3.0, f"0.{member}", prompt_tokens=2000, remaining_tokens=100, prefix_key="0")
    finished = drain(fast, 3.0)
    costs = StepCosts(MODEL, GPU, 1, CONSTANTS)
    assert {one.time for one in finished} == {
        3.0 + costs.prefill_seconds(2000, 0) + costs.steps(16, 16 * 2000).seconds(100)
    }
    assert fast.statistics(finished[-1].time).prefilled_tokens == 2000


def test_what_is_added_at_a_border_joins_there():
    fast = engine()
    fast.add(0.0, "a", prompt_tokens=10, remaining_tokens=5)
    fast.add(0.0, "b", prompt_tokens=10, remaining_tokens=50)
    end_of_a = fast.next_event(0.0)
    assert [one.trajectory_id for one in fast.advance(end_of_a)] == ["a"]
    fast.add(end_of_a, "c", prompt_tokens=10, remaining_tokens=5)
    fast.next_event(end_of_a)
    assert fast.load(end_of_a)[:2] == (2, 0)


def test_kv_utilization_grows_by_a_token_per_step_and_trajectory():
    fast = engine(capacity=1000)
    for id in "ab":
        fast.add(0.0, id, prompt_tokens=100, remaining_tokens=50)
    start = StepCosts(MODEL, GPU, 1, CONSTANTS).prefill_seconds(100, 0) * 2
    steps = StepCosts(MODEL, GPU, 1, CONSTANTS).steps(2, 200)
    assert fast.load(0.0) == (2, 0, 0.2)
    assert fast.load(start + steps.seconds(10) + 1e-6) == (2, 0, 0.22)
    assert fast.progress(start + steps.seconds(10) + 1e-6, "a") == 10
    assert fast.progress(start + steps.seconds(11) - 1e-6, "a") == 10


def test_a_stopped_engine_goes_on_where_it_was():
    plain, stopped = engine(), engine()
    for one in (plain, stopped):
        one.add(0.0, "a", prompt_tokens=100, remaining_tokens=200)
        one.add(0.0, "b", prompt_tokens=100, remaining_tokens=100)
    middle = 0.6 * plain.next_event(0.0)
    stopped.stop(middle)
    before = stopped.progress_all(middle)
    assert stopped.next_event(middle + 5) is None
    assert stopped.progress_all(middle + 5) == before and 0 < before["a"] < 100
    stopped.resume(middle + 7)
    first, second = drain(plain), drain(stopped, middle + 7)
    assert [one.time + 7 for one in first] == pytest.approx([one.time for one in second], rel=1e-12)
    end = second[-1].time
    seen = stopped.statistics(end)
    assert seen.stopped_seconds == pytest.approx(7)
    assert seen.decode_seconds == pytest.approx(plain.statistics(first[-1].time).decode_seconds)
    assert seen.idle_seconds == 0


def test_calls_to_a_stopped_engine_take_effect_when_it_resumes():
    fast = engine()
    fast.add(0.0, "a", prompt_tokens=100, remaining_tokens=200)
    middle = 0.5 * fast.next_event(0.0)
    fast.stop(middle)
    done = fast.progress(middle, "a")
    assert fast.remove(middle + 1, "a") == done
    fast.add(middle + 2, "a", prompt_tokens=100, done_tokens=done, remaining_tokens=200 - done)
    assert fast.load(middle + 2)[:2] == (0, 1)
    fast.resume(middle + 3)
    (finished,) = drain(fast, middle + 3)
    assert finished.tokens == 200 and finished.time > middle + 3


def test_a_pause_runs_out_while_the_engine_is_stopped():
    fast = engine()
    fast.add(0.0, "a", prompt_tokens=10, remaining_tokens=20, pauses=((10, 1.0),))
    paused_at = fast.next_event(0.0)
    fast.advance(paused_at)
    fast.stop(paused_at + 0.5)
    fast.resume(paused_at + 4.0)
    assert fast.next_event(paused_at + 4.0) > paused_at + 4.0
    (finished,) = drain(fast, paused_at + 4.0)
    steps = StepCosts(MODEL, GPU, 1, CONSTANTS).steps(1, 20)
    assert finished.time == pytest.approx(paused_at + 4.0 + steps.seconds(10))
    seen = fast.statistics(finished.time)
    assert seen.environment_seconds == pytest.approx(0.5) and seen.stopped_seconds == pytest.approx(3.5)


def test_the_seconds_add_up():
    _, max_running, calls = random_workload(12)
    fast = engine(max_running, 700)
    for now, call, what in calls:
        if call == "add":
            fast.add(now, what[0], prompt_tokens=what[1], remaining_tokens=what[3], pauses=what[4])
    fast.stop(calls[-1][0] + 0.1)
    fast.resume(calls[-1][0] + 0.35)
    for now in (calls[-1][0] + 0.2, calls[-1][0] + 1.0, 100.0):
        seen = fast.statistics(max(now, calls[-1][0] + 0.35))
        total = (
            seen.decode_seconds
            + seen.prefill_seconds
            + seen.environment_seconds
            + seen.idle_seconds
            + seen.stopped_seconds
        )
        assert total == pytest.approx(max(now, calls[-1][0] + 0.35))
    assert 0 < seen.mean_kv_utilization(700) < 1


def test_what_cannot_be_is_refused():
    fast = engine(capacity=100)
    fast.add(0.0, "a", prompt_tokens=10, remaining_tokens=5)
    with pytest.raises(ValueError, match="in this engine already"):
        fast.add(0.0, "a", prompt_tokens=10, remaining_tokens=5)
    with pytest.raises(ValueError, match="60 \\+ 41 tokens, the KV cache has 100"):
        fast.add(0.0, "b", prompt_tokens=60, remaining_tokens=41)
    with pytest.raises(ValueError, match="remaining_tokens=0"):
        fast.add(0.0, "b", prompt_tokens=60, remaining_tokens=0)
    assert fast.remove(0.0, "never here") is None


@pytest.mark.parametrize(
    ("model", "device", "tensor_parallel", "context", "tokens_per_s"),
    [
        ("Qwen2.5-7B", "A100-80GB", 1, 1024, 84.28),
        ("Qwen2.5-7B", "A100-80GB", 1, 15_360, 77.69),
        ("Qwen2.5-7B", "A100-80GB", 1, 31_744, 70.33),
        ("Qwen2.5-72B", "A100-80GB", 4, 1024, 31.37),
        ("Qwen2.5-72B", "H100", 2, 640, 32.34),
    ],
)
def test_published_speeds_at_batch_1_are_met_within_a_fifth(model, device, tensor_parallel, context, tokens_per_s):
    """Qwen's speed benchmark (vLLM 0.6.3) and tt-inference-server issue 143."""
    costs = StepCosts(language_model(model), gpu(device), tensor_parallel, CONSTANTS)
    assert 1 / costs.steps(1, context).seconds(1) == pytest.approx(tokens_per_s, rel=0.2)
