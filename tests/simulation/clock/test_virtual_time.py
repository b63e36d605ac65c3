"""Virtual time: order, jumps of the clock, and how a run ends that cannot go on."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from laminar.simulation.clock import virtual_time
from laminar.simulation.clock.virtual_time import (
    Deadlock,
    Livelock,
    RealWorldRefused,
    TaskDied,
    VirtualTimeLimit,
    VirtualTimeLoop,
    run_in_virtual_time,
)

ROOT = Path(__file__).parents[3]


def run(main, limit_s=1e9):
    return run_in_virtual_time(main, limit_s=limit_s)


def now():
    return asyncio.get_running_loop().time()


def test_a_year_passes_at_once_and_the_clock_is_exact():
    async def main():
        await asyncio.sleep(0.1)
        await asyncio.sleep(365 * 86400.0)
        return now()

    started = time.monotonic()
    assert run(main()) == 0.1 + 365 * 86400.0
    assert time.monotonic() - started < 5


def test_timers_fire_in_order_of_time_and_then_of_scheduling():
    async def main():
        loop = asyncio.get_running_loop()
        rng = random.Random(1)
        expected, fired = [], []
        for k in range(2_000):
            when = rng.choice([1.0, 2.0, 2.0 + 1e-12, 3.5, 1e6])
            expected.append((when, k))
            loop.call_at(when, lambda when=when, k=k: fired.append((when, k, loop.time())))
        await asyncio.sleep(1e6 + 1)
        assert [(when, k) for when, k, _ in fired] == sorted(expected)
        assert all(when == at for when, _, at in fired)

    run(main())


def test_a_timer_that_is_due_takes_its_turn_with_what_is_ready():
    async def main():
        loop = asyncio.get_running_loop()
        order = []
        loop.call_soon(order.append, "soon")
        loop.call_at(-5.0, order.append, "past")
        loop.call_later(0, order.append, "now")
        loop.call_later(1e-30, order.append, "after")
        loop.call_soon(order.append, "soon again")
        await asyncio.sleep(1)
        return order

    assert run(main()) == ["soon", "past", "now", "soon again", "after"]


def test_a_timer_at_no_time_is_refused():
    async def main():
        asyncio.get_running_loop().call_later(float("nan"), print)

    with pytest.raises(ValueError, match="a timer at nan s"):
        run(main())


def test_cancelled_timers_do_not_fire_and_do_not_pile_up():
    async def main():
        loop = asyncio.get_running_loop()
        fired = []
        for k in range(20_000):
            handle = loop.call_later(1 + k % 7, fired.append, k)
            assert handle.when() == 1 + k % 7
            if k % 10:
                handle.cancel()
                handle.cancel()
                assert handle.cancelled()
        assert len(loop._timers) < 2 * 2_000 + virtual_time.MIN_CANCELLED + 2
        await asyncio.sleep(10)
        assert sorted(fired) == list(range(0, 20_000, 10))
        assert fired == sorted(fired, key=lambda k: (k % 7, k))

    run(main())


def test_a_cancelled_callback_that_was_ready_does_not_run():
    async def main():
        loop = asyncio.get_running_loop()
        ran = []
        second = None
        loop.call_later(1, lambda: second.cancel())
        second = loop.call_later(1, ran.append, "second")
        await asyncio.sleep(2)
        return ran

    assert run(main()) == []


def test_plain_asyncio_works():
    async def main():
        queue, event, log = asyncio.Queue(maxsize=2), asyncio.Event(), []

        async def producer():
            for k in range(5):
                await asyncio.sleep(1)
                await queue.put(k)
            event.set()

        async def consumer():
            while len(log) < 5:
                log.append((now(), await queue.get()))
                await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as group:
            group.create_task(producer())
            group.create_task(consumer())
            await event.wait()
            assert now() == 5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        assert now() == 15.5
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(99), 2.5)
        assert await asyncio.gather(asyncio.sleep(1, "a"), asyncio.sleep(2, "b")) == ["a", "b"]
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(3)), asyncio.create_task(asyncio.sleep(1))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert (len(done), len(pending), now()) == (1, 1, 21)
        return log

    assert [k for _, k in run(main())] == [0, 1, 2, 3, 4]


def test_a_deadlock_lists_each_task_with_where_it_is_and_what_it_awaits():
    async def reader(queue):
        await queue.get()

    async def main():
        event = asyncio.Event()
        one = asyncio.create_task(reader(asyncio.Queue()), name="reader of nothing")
        asyncio.create_task(event.wait(), name="bare wait")  # noqa: RUF006
        await asyncio.sleep(2)
        await one

    with pytest.raises(Deadlock) as caught:
        run(main())
    text = str(caught.value)
    assert text.startswith("nothing can happen any more")
    assert "at t = 2 s; 3 pending tasks:" in text
    lines = text.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["Task-1", "reader of nothing", "bare wait"]
    assert "simulation/clock/test_virtual_time.py:" in lines[0]
    assert "main, awaits task 'reader of nothing'" in lines[0]
    assert "reader, awaits Queue.get (asyncio/queues.py:" in lines[1]
    assert "Event.wait, awaits Future" in lines[2]


def test_the_limit_of_virtual_time_ends_a_run_that_beats_for_ever():
    async def heartbeat():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(5)

    async def main():
        beat = asyncio.create_task(heartbeat(), name="heartbeats")
        await asyncio.wait([beat])

    with pytest.raises(VirtualTimeLimit) as caught:
        run(main(), limit_s=60)
    assert str(caught.value).startswith("not done within 60 s at t = 60 s; 2 pending tasks:")
    assert "heartbeat, awaits sleep (asyncio/tasks.py:" in str(caught.value)


def test_what_is_done_at_the_limit_is_in_time():
    assert run(asyncio.sleep(60, "done"), limit_s=60) == "done"


def test_callbacks_that_never_let_the_time_pass_are_a_livelock(monkeypatch):
    monkeypatch.setattr(virtual_time, "CALLBACKS_PER_INSTANT", 1_000)

    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="more than 1000 callbacks and no end at t = 0 s; 1 pending task:"):
        run(main())


def test_a_task_that_dies_unseen_fails_the_run_that_was_well_otherwise():
    kept = []

    async def dies():
        raise KeyError("lost")

    async def main():
        kept.append(asyncio.create_task(dies(), name="the one"))
        await asyncio.sleep(1)

    with pytest.raises(TaskDied, match="task 'the one': KeyError: 'lost'") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_task_that_dies_unseen_explains_a_deadlock():
    async def dies():
        raise KeyError("lost")

    async def main():
        asyncio.create_task(dies(), name="the one")  # noqa: RUF006
        await asyncio.Event().wait()

    with pytest.raises(TaskDied, match="the one") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, KeyError)
    assert "nothing can happen any more" in caught.value.__notes__[0]


def test_a_failure_that_somebody_takes_however_late_is_no_death():
    async def dies():
        raise KeyError("lost")

    async def main():
        task = asyncio.create_task(dies())
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(dies())
        await asyncio.sleep(100)
        with pytest.raises(KeyError):
            await task
        return "well"

    assert run(main()) == "well"


def test_a_failing_callback_ends_the_run_at_once():
    def fails():
        raise ZeroDivisionError("in a callback")

    times = []

    async def main():
        asyncio.get_running_loop().call_later(3, fails)
        try:
            await asyncio.sleep(1_000)
        finally:
            times.append(now())

    with pytest.raises(TaskDied, match="callback .*fails: ZeroDivisionError: in a callback") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert times == [3]


def test_what_main_raises_comes_first_and_names_the_dead():
    async def dies():
        raise KeyError("lost")

    async def main():
        asyncio.create_task(dies(), name="the one")  # noqa: RUF006
        await asyncio.sleep(1)
        raise ValueError("of main")

    with pytest.raises(ValueError, match="of main") as caught:
        run(main())
    assert "the one" in caught.value.__notes__[0]


def test_tasks_that_are_left_are_cancelled_in_order_and_awaited():
    log = []

    async def stays(name):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            log.append((name, now()))

    async def main():
        kept = [asyncio.create_task(stays(name)) for name in "abc"]
        await asyncio.sleep(1)
        del kept

    run(main(), limit_s=1)
    assert log == [("a", 2), ("b", 2), ("c", 2)]


def test_a_task_that_is_started_at_the_end_is_ended_too():
    log = []

    async def stays(name, successor):
        try:
            await asyncio.Event().wait()
        finally:
            log.append(name)
            if successor:
                asyncio.create_task(stays(successor, None))  # noqa: RUF006
                await asyncio.sleep(0)

    async def main():
        asyncio.create_task(stays("first", "second"))  # noqa: RUF006
        await asyncio.sleep(0)

    run(main())
    assert log == ["first", "second"]


def test_a_task_that_does_not_end_when_cancelled_is_told():
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main():
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006
        await asyncio.sleep(0)

    with pytest.raises(VirtualTimeLimit, match="stubborn"):
        run(main())


def test_a_failure_while_being_cancelled_is_a_death():
    async def stays():
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("at the end")

    async def main():
        asyncio.create_task(stays(), name="the one")  # noqa: RUF006
        await asyncio.sleep(0)

    with pytest.raises(TaskDied, match="the one"):
        run(main())


def test_asynchronous_generators_are_closed():
    closed = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(now())

    kept = []

    async def main():
        kept.append(numbers())
        assert await anext(kept[0]) == 1
        async for _ in numbers():
            break
        await asyncio.sleep(5)

    run(main())
    assert closed == [1, 6]


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: asyncio.to_thread(print),
        lambda loop: asyncio.open_connection("127.0.0.1", 1),
        lambda loop: asyncio.start_unix_server(print, "none.sock"),
        lambda loop: asyncio.create_subprocess_exec("true"),
        lambda loop: loop.add_signal_handler(2, print),
        lambda loop: loop.add_reader(0, print),
    ],
)
def test_the_real_world_is_refused(call):
    async def main():
        await call(asyncio.get_running_loop())

    with pytest.raises(RealWorldRefused, match="virtual time cannot wait for real threads"):
        run(main())


def test_another_thread_cannot_schedule():
    async def main():
        loop, refused = asyncio.get_running_loop(), []

        def schedule():
            try:
                loop.call_soon_threadsafe(print)
            except RealWorldRefused as error:
                refused.append(error)

        thread = threading.Thread(target=schedule)
        thread.start()
        thread.join()
        assert len(refused) == 1

    run(main())


def test_a_loop_inside_a_loop_is_refused():
    async def main():
        with pytest.raises(RuntimeError, match="cannot be called inside another"):
            run(asyncio.sleep(0))

    run(main())


def test_callbacks_are_counted():
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        before = loop.callbacks_run
        for k in range(100):
            loop.call_later(k + 1, str)
        await asyncio.sleep(1_000)
        return loop.callbacks_run - before

    assert 100 <= run(main()) <= 105


SCRIPT = """
import asyncio
from laminar.simulation.clock.virtual_time import run_in_virtual_time

async def worker(name, log):
    try:
        await asyncio.Event().wait()
    finally:
        log.append(name)

async def main():
    padding = [object() for _ in range({padding})]
    log = []
    try:
        async with asyncio.TaskGroup() as group:
            for k in range(50):
                group.create_task(worker(f"w{{k}}", log))
            await asyncio.sleep(1)
            raise KeyError
    except* KeyError:
        pass
    done, _ = await asyncio.wait([asyncio.create_task(asyncio.sleep(0, k)) for k in range(50)])
    return log, [task.result() for task in done]

print(run_in_virtual_time(main(), limit_s=10))
"""


def test_every_process_has_the_same_order_even_of_sets_of_tasks():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(padding=padding)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed, padding in (("0", 0), ("1", 12345), ("2", 777))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert "'w0', 'w1'" in outputs[0]
