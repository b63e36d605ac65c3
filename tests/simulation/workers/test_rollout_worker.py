import dataclasses

import numpy as np
import pytest

from laminar.protocol import messages
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.workers.kv_shelf import KvShelf
from laminar.simulation.workers.modelled_worker import Life
from laminar.simulation.workers.rollout_worker import ModelledRollout
from laminar.simulation.workers.token_arrays import TokenArrays
from laminar.simulation.workers.weight_stores import WeightTimes
from tests.simulation.small_cluster import experiment, workload
from tests.simulation.worker_bench import Desk, in_virtual_time

TIMES = WeightTimes(nbytes=1000, latency_s=0.0, bandwidth=1e6, pull_s=0.25)
DATA = workload(experiment())


class Bench(Desk):
    """One rollout, told and heard."""

    def __init__(self, *, delta_interval_s=0.5, store=(3,), heartbeat_s=None):
        super().__init__()
        self.shelf = KvShelf(1000)
        for version in store:
            self.stores.put("relay-0", version, 2)
        self.rollout = ModelledRollout(
            self.network,
            Life(index=0, heartbeat_s=heartbeat_s),
            engine=RooflineEngine(language_model("Qwen2.5-7B"), gpu("H800"), 1, 8),
            workload=DATA,
            times=TIMES,
            stores=self.stores,
            shelf=self.shelf,
            arrays=TokenArrays(),
            delta_interval_s=delta_interval_s,
        )

    async def tell(self, message):
        await super().tell(self.rollout, message)

    async def serve(self, version=3, *, exact=False):
        await self.tell(messages.Welcome(run_id="r", run_dir="", config="", store="", hop_key=b"", version_bytes=0))
        await self.tell(messages.PullWeights(policy_version=version, store="relay-0", exact=exact))
        answers = [m for m in await self.listen(1.0) if isinstance(m, messages.WeightsPulled | messages.PullFailed)]
        return answers[0]

    def deltas(self):
        return [(at, message) for at, _, message in self.said if isinstance(message, messages.TrajectoryDeltas)]

    def tokens_of(self, trajectory_id):
        """Token ids as the controller would put them together, and the last finish reason."""
        ids, reason = [], None
        for _, message in self.deltas():
            ends = np.cumsum(message.token_counts)
            for k, id in enumerate(message.trajectory_ids):
                if id == trajectory_id:
                    assert message.starts[k] == len(ids)
                    ids += message.token_ids[ends[k] - message.token_counts[k] : ends[k]].tolist()
                    reason = message.finish_reasons[k]
        return ids, reason


def assignment(trajectory_id="7.1", *, prompt_id=7, lease=1, version=3, done=0, max_new=400):
    return messages.TrajectoryAssignment(
        trajectory_id=trajectory_id,
        lease=lease,
        policy_version=version,
        prompt_token_ids=np.full(32, prompt_id, np.int32),
        token_ids=np.full(done, version, np.int32),
        max_new_tokens=max_new,
        seed=0,
    )


@in_virtual_time
async def test_it_says_hello_and_is_ready_after_the_welcome():
    bench = Bench()
    (hello,) = await bench.listen(5)
    assert (hello.kind, hello.index) == ("rollout", 0)
    await bench.tell(messages.Welcome(run_id="r", run_dir="", config="", store="", hop_key=b"", version_bytes=0))
    await bench.tell(messages.Welcome(run_id="r", run_dir="", config="", store="", hop_key=b"", version_bytes=0))
    said = await bench.listen(5)
    assert [type(message) for message in said] == [messages.Ready]


@in_virtual_time
async def test_a_trajectory_has_exactly_the_tokens_of_the_workload():
    bench = Bench()
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(), assignment("7.0"))))
    await bench.listen(20)
    for member in (0, 1):
        ids, reason = bench.tokens_of(f"7.{member}")
        assert ids == [3] * DATA.response_tokens(7, member)
        assert reason == "stop"


@in_virtual_time
async def test_gains_come_at_the_interval_and_a_finish_at_once():
    bench = Bench(delta_interval_s=0.5)
    await bench.serve()
    started = bench.loop.time()
    await bench.tell(messages.Generate(assignments=(assignment(),)))
    await bench.listen(20)
    times = [round(at - started, 6) for at, _ in bench.deltas()]
    assert times[:-1] == [round(0.5 * k, 6) for k in range(1, len(times))]
    assert times[-1] % 0.5 != 0
    assert bench.rollout.engine.load(bench.loop.time())[0] == 0


@in_virtual_time
async def test_a_trajectory_goes_on_behind_the_tokens_that_it_has():
    bench = Bench()
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(done=20, max_new=380, lease=4),)))
    await bench.listen(20)
    first, last = bench.deltas()[0][1], bench.deltas()[-1][1]
    assert first.starts.tolist() == [20] and first.leases == (4,)
    assert last.starts[0] + last.token_counts[0] == DATA.response_tokens(7, 1)


@in_virtual_time
async def test_a_trajectory_is_cut_at_the_limit_of_its_assignment():
    bench = Bench()
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(max_new=10),)))
    await bench.listen(20)
    assert bench.tokens_of("7.1") == ([3] * 10, "length")


@in_virtual_time
async def test_one_with_all_its_tokens_finishes_at_once():
    bench = Bench()
    await bench.serve()
    total = DATA.response_tokens(7, 1)
    await bench.tell(messages.Generate(assignments=(assignment(done=total, max_new=400 - total),)))
    await bench.listen(1)
    ((_, delta),) = bench.deltas()
    assert delta.token_counts.tolist() == [0] and delta.finish_reasons == ("stop",)


@in_virtual_time
async def test_a_stop_sends_the_last_tokens_of_all_in_one_message_and_they_can_come_back():
    bench = Bench(delta_interval_s=100)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(), assignment("7.0"))))
    await bench.listen(0.3)
    await bench.tell(messages.AbortTrajectories(trajectory_ids=("7.0", "7.1", "9.9")))
    await bench.listen(5)
    ((_, delta),) = bench.deltas()
    assert delta.trajectory_ids == ("7.0", "7.1") and delta.finish_reasons == ("abort", "abort")
    had = int(delta.token_counts[1])
    assert 0 < had < DATA.response_tokens(7, 1)
    await bench.tell(messages.Generate(assignments=(assignment(done=had, max_new=400 - had, lease=2),)))
    await bench.listen(20)
    ids, reason = bench.tokens_of("7.1")
    assert ids == [3] * DATA.response_tokens(7, 1) and reason == "stop"


@in_virtual_time
async def test_kv_of_a_stopped_trajectory_is_imported_once_and_saves_the_prefill():
    bench = Bench(delta_interval_s=100)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(),)))
    await bench.listen(0.3)
    await bench.tell(messages.AbortTrajectories(trajectory_ids=("7.1",), export_kv=True))
    await bench.listen(5)
    ((_, delta),) = bench.deltas()
    (kv,) = delta.exported_kv
    had = int(delta.token_counts[0])
    assert list(bench.shelf) == [kv.name]
    assert kv.tokens == len(assignment().prompt_token_ids) + had and kv.nbytes == 1000 * kv.tokens
    for lease, error in ((2, False), (3, True)):  # the second time it is gone
        before = bench.rollout.engine.statistics(bench.rollout.loop.time())
        again = dataclasses.replace(assignment(done=had, max_new=400 - had, lease=lease), kv=kv)
        await bench.tell(messages.Generate(assignments=(again,)))
        await bench.listen(0.2)
        after = bench.rollout.engine.statistics(bench.rollout.loop.time())
        taken = [m for _, _, m in bench.said if isinstance(m, messages.KvTaken)][-1]
        assert (taken.lease, bool(taken.error), taken.tokens) == (lease, error, 0 if error else kv.tokens)
        assert (after.imported_tokens > before.imported_tokens) is not error
        assert (after.prefilled_tokens > before.prefilled_tokens) is error
        await bench.tell(messages.AbortTrajectories(trajectory_ids=("7.1",)))
        await bench.listen(1)


@in_virtual_time
async def test_exports_that_nobody_needs_go():
    bench = Bench(delta_interval_s=100)
    for member in range(3):
        bench.shelf.put(f"rollout-{member + 1}", f"7.{member}", 1, 3, 10)
    await bench.serve()
    await bench.tell(messages.DropKv(names=("rollout-1~7.0~1",), exporters=("rollout-3",)))
    await bench.listen(1)
    assert list(bench.shelf) == ["rollout-2~7.1~1"]


@in_virtual_time
async def test_an_assignment_that_is_said_twice_is_taken_once():
    bench = Bench()
    await bench.serve()
    message = messages.Generate(assignments=(assignment(),))
    await bench.tell(message)
    await bench.tell(message)
    await bench.listen(20)
    assert bench.tokens_of("7.1")[0] == [3] * DATA.response_tokens(7, 1)


async def generate_with_another_version():
    bench = Bench()
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(version=4),)))
    await bench.listen(1)


def test_a_version_that_it_does_not_serve_is_an_error():
    with pytest.raises(Exception, match="serves version 3, was asked to generate 7.1 with version 4"):
        run_in_virtual_time(generate_with_another_version(), limit_s=100)


@in_virtual_time
async def test_a_pull_takes_the_newest_of_the_store_unless_exact():
    bench = Bench(store=(3, 5))
    pulled = await bench.serve(3)
    assert pulled == messages.WeightsPulled(policy_version=5, seconds=0.25, nbytes=1000)
    bench = Bench(store=(3, 5))
    assert (await bench.serve(3, exact=True)).policy_version == 3


@in_virtual_time
async def test_a_pull_of_what_the_store_does_not_hold_fails():
    for store, exact in (((3,), False), ((5, 6), True), ((), False)):
        answer = await Bench(store=store).serve(4, exact=exact)
        assert isinstance(answer, messages.PullFailed) and answer.policy_version == 4


@in_virtual_time
async def test_it_reports_its_load_when_asked():
    bench = Bench(delta_interval_s=100)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(), assignment("7.0"))))
    await bench.listen(0.2)
    await bench.tell(messages.ReportLoad())
    (load,) = await bench.listen(0.1)
    assert load.running == 2 and load.waiting == 0 and 0 < load.kv_utilization < 1
    assert load.steps.running.tolist() == [2] and load.steps.seconds[0] > 0
    assert load.steps.kv_utilization.tolist() == pytest.approx([load.kv_utilization])
    assert load.prefill_s_per_token > load.kv_move_s_per_token > 0


@in_virtual_time
async def test_a_killed_rollout_is_never_heard_again():
    bench = Bench(heartbeat_s=0.5)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(),)))
    await bench.listen(0.2)
    ends = []
    bench.rollout.on_ended = lambda worker, reason: ends.append(reason)
    bench.rollout.kill()
    bench.rollout.kill()
    assert await bench.listen(50) == []
    assert ends == ["signal SIGKILL"]


@in_virtual_time
async def test_one_that_was_told_to_end_says_nothing_more():
    bench = Bench(heartbeat_s=0.3)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(),)))
    await bench.tell(messages.Shutdown(reason="the run has ended"))
    assert await bench.listen(50) == [] and not bench.rollout.alive


@in_virtual_time
async def test_a_hung_rollout_makes_no_tokens_and_goes_on_later():
    bench = Bench(heartbeat_s=1.0, delta_interval_s=100)
    await bench.serve()
    await bench.tell(messages.Generate(assignments=(assignment(),)))
    await bench.listen(0.2)
    had = bench.rollout.engine.progress(bench.loop.time(), "7.1")
    bench.rollout.hang()
    await bench.tell(messages.ReportLoad())
    assert await bench.listen(60) == []
    assert bench.rollout.engine.progress(bench.loop.time(), "7.1") == had
    bench.rollout.resume()
    said = await bench.listen(20)
    assert any(isinstance(message, messages.RolloutLoad) for message in said)
    assert bench.tokens_of("7.1")[0] == [3] * DATA.response_tokens(7, 1)
