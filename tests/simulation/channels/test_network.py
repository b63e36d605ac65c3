"""The network in memory: order, latency, faults, counts; and the real controller on it."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.observability import events as event_types
from laminar.protocol import messages
from laminar.protocol.channel import PeerClosed, PeerGone
from laminar.protocol.codec import CodecError
from laminar.simulation.channels.network import SimulatedNetwork, jittered_latency
from laminar.simulation.channels.network_lane import NetworkStatistics
from laminar.simulation.clock.virtual_time import TaskDied, run_in_virtual_time
from tests.controller import fake_workers as fakes
from tests.controller import test_controller

ROOT = Path(__file__).parents[3]


def run(main):
    return run_in_virtual_time(main, limit_s=10_000)


def now():
    return asyncio.get_running_loop().time()


class Peer:
    """A worker that keeps what it gets, with the time."""

    def __init__(self, network, name):
        self.got = []
        self.end = network.connect(name, lambda message: self.got.append((now(), message)))
        self.send = self.end.send


class Controller:
    """Keeps what comes from all peers, and whose connections closed, with the time."""

    def __init__(self, network):
        self.got = []
        self.closed = []
        self.network = network
        self.send = network.controller.send
        self.task = asyncio.create_task(self.receive())

    async def receive(self):
        while True:
            peer, message = await self.network.controller.receive()
            if isinstance(message, PeerClosed):
                self.closed.append((now(), peer.decode()))
            else:
                assert peer.decode() not in [gone for _, gone in self.closed]
                self.got.append((now(), peer.decode(), message))

    def of(self, name):
        return [message for _, peer, message in self.got if peer == name]


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_messages_arrive_after_the_latency_in_order(latency):
    async def main():
        network = SimulatedNetwork(latency=latency)
        controller, peer = Controller(network), Peer(network, "rollout-0")
        for k in range(3):
            peer.send(("up", k))
            await controller.send(b"rollout-0", ("down", k))
        assert peer.got == []  # in a callback of its own, also without latency
        await asyncio.sleep(1)
        peer.send("later")
        await asyncio.sleep(1)
        up = [(latency, "rollout-0", ("up", k)) for k in range(3)]
        assert controller.got == [*up, (1 + latency, "rollout-0", "later")]
        assert peer.got == [(latency, ("down", k)) for k in range(3)]
        assert network.statistics == NetworkStatistics(sent=7, delivered=7)
        assert network.under_way == 0

    run(main())


def test_peers_overtake_one_another_but_a_peer_never_itself():
    async def main():
        network = SimulatedNetwork(latency=jittered_latency(0.01, 1.0, random.Random(3)))
        controller = Controller(network)
        peers = [Peer(network, f"rollout-{k}") for k in range(4)]
        for k in range(50):
            for index, peer in enumerate(peers):
                peer.send((k, index))
                await controller.send(f"rollout-{index}".encode(), k)
        await asyncio.sleep(2)
        assert all(controller.of(f"rollout-{index}") == [(k, index) for k in range(50)] for index in range(4))
        assert all([message for _, message in peer.got] == list(range(50)) for peer in peers)
        arrived = [message for _, _, message in controller.got]
        assert arrived != sorted(arrived)
        assert all(0.01 <= at <= 1.01 for at, _, _ in controller.got)

    run(main())


def test_the_latency_of_each_peer_is_asked_for():
    async def main():
        network = SimulatedNetwork(latency=lambda name: 3.0 if name == "far" else 0.5)
        controller, far, near = Controller(network), Peer(network, "far"), Peer(network, "near")
        far.send(1)
        near.send(2)
        await asyncio.sleep(5)
        assert controller.got == [(0.5, "near", 2), (3.0, "far", 1)]

    run(main())


def test_a_slow_peer_and_as_usual_again():
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer = Controller(network), Peer(network, "w")
        network.slow("w", factor=10, extra_s=2)
        peer.send("slow")
        network.slow("w")
        peer.send("behind the slow one")
        await controller.send(b"w", "down")
        await asyncio.sleep(20)
        peer.send("as usual")
        await asyncio.sleep(20)
        assert [(at, message) for at, _, message in controller.got] == [
            (12, "slow"),
            (12, "behind the slow one"),
            (21, "as usual"),
        ]
        assert peer.got == [(1, "down")]

    run(main())


def test_a_partition_holds_both_directions_back_until_it_heals():
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer, other = Controller(network), Peer(network, "w"), Peer(network, "other")
        peer.send("on its way")
        await asyncio.sleep(0.5)
        network.partition("w")
        other.send("of another")
        peer.send("in the partition")
        await controller.send(b"w", "down")
        await asyncio.sleep(10)
        assert controller.got == [(1.5, "other", "of another")]
        assert peer.got == []
        assert network.under_way == 3
        peer.send("just before the healing")
        network.heal("w")
        peer.send("after it")
        await asyncio.sleep(5)
        assert [(at, message) for at, _, message in controller.got[1:]] == [
            (10.5, "on its way"),
            (10.5, "in the partition"),
            (11.5, "just before the healing"),
            (11.5, "after it"),
        ]
        assert peer.got == [(10.5, "down")]
        assert network.under_way == 0

    run(main())


def test_without_latency_nothing_overtakes_what_a_partition_held_back():
    async def main():
        network = SimulatedNetwork()
        controller, peer = Controller(network), Peer(network, "w")
        network.partition("w")
        peer.send(1)
        network.heal("w")
        peer.send(2)
        network.partition("w")
        peer.send(3)
        await asyncio.sleep(1)
        assert controller.got == []
        network.heal("w")
        await asyncio.sleep(1)
        assert controller.of("w") == [1, 2, 3]

    run(main())


def test_a_message_without_latency_does_not_overtake_one_that_arrives_at_this_instant():
    async def main():
        network = SimulatedNetwork()
        controller, peer = Controller(network), Peer(network, "w")
        asyncio.get_running_loop().call_later(1, peer.send, "second")  # runs before the first arrives
        network.slow("w", extra_s=1.0)
        peer.send("first")
        network.slow("w")
        await asyncio.sleep(5)
        assert controller.got == [(1, "w", "first"), (1, "w", "second")]

    run(main())


@pytest.mark.parametrize("deliver_sent", [True, False])
def test_the_death_of_a_peer(deliver_sent):
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer = Controller(network), Peer(network, "w")
        peer.send("last words")
        await controller.send(b"w", "too late")
        network.disconnect("w", deliver_sent=deliver_sent)
        assert not network.is_connected("w")
        with pytest.raises(PeerGone, match="w is not connected"):
            await controller.send(b"w", "to the dead")
        peer.send("of the dead")
        await asyncio.sleep(5)
        assert controller.of("w") == (["last words"] if deliver_sent else [])
        assert peer.got == []
        assert network.statistics == NetworkStatistics(sent=3, delivered=int(deliver_sent), dropped=3 - deliver_sent)
        with pytest.raises(ValueError, match="w has connected before"):
            network.worker("w")
        again = Peer(network, "w#2")
        again.send("hello")
        await controller.send(b"w#2", "welcome")
        await asyncio.sleep(5)
        assert controller.of("w#2") == ["hello"]
        assert [message for _, message in again.got] == ["welcome"]

    run(main())


@pytest.mark.parametrize("deliver_sent", [True, False])
def test_a_closed_connection_is_told_once_after_the_last_message(deliver_sent):
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer, silent = Controller(network), Peer(network, "w"), Peer(network, "silent")
        peer.send("hello")
        await asyncio.sleep(5)
        network.slow("w", extra_s=2.0)
        peer.send("last words")
        network.slow("w")
        await asyncio.sleep(0.5)
        network.disconnect("w", deliver_sent=deliver_sent)
        peer.end.close()
        silent.end.close()  # nobody the controller has heard of
        await asyncio.sleep(20)
        assert controller.of("w") == ["hello", *["last words"] * deliver_sent]
        assert controller.closed == [(8, "w")]

    run(main())


@pytest.mark.parametrize("deliver_sent", [True, False])
def test_behind_a_partition_no_connection_is_seen_to_close(deliver_sent):
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, cut, hung = Controller(network), Peer(network, "cut"), Peer(network, "hung")
        for peer in (cut, hung):
            peer.send("hello")
        await asyncio.sleep(5)
        network.hang("hung")
        network.partition("cut")
        cut.send("held back")
        await asyncio.sleep(50)
        assert controller.closed == []
        network.disconnect("cut", deliver_sent=deliver_sent)
        network.disconnect("hung", deliver_sent=deliver_sent)
        await asyncio.sleep(50)
        assert controller.closed == [(56, "hung")]
        network.heal("cut")
        await asyncio.sleep(5)
        assert controller.closed == [(56, "hung"), (105, "cut")]

    run(main())


def test_a_network_that_tells_of_no_closed_connection():
    async def main():
        network = SimulatedNetwork(tell_closed=False)
        controller, peer = Controller(network), Peer(network, "w")
        peer.send("hello")
        network.disconnect("w")
        await asyncio.sleep(5)
        assert controller.of("w") == ["hello"]
        assert controller.closed == []

    run(main())


def test_what_a_partition_holds_back_is_lost_with_its_peer():
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer = Controller(network), Peer(network, "w")
        network.duplicate("w", 1.0, within_s=9)
        peer.send("held")
        network.partition("w")
        await asyncio.sleep(2)
        peer.send("under way")
        network.disconnect("w", deliver_sent=True)
        network.heal("w")
        await asyncio.sleep(20)
        assert controller.got == []
        assert network.statistics == NetworkStatistics(sent=2, duplicated=2, dropped=4)

    run(main())


def test_a_worker_that_hangs_sends_but_takes_nothing():
    async def main():
        network = SimulatedNetwork(latency=1.0)
        controller, peer = Controller(network), Peer(network, "w")
        network.hang("w")
        peer.send("up")
        for k in range(3):
            await controller.send(b"w", k)
        await asyncio.sleep(5)
        assert controller.of("w") == ["up"]
        assert peer.got == []
        network.partition("w")
        network.resume("w")
        await asyncio.sleep(5)
        assert peer.got == []  # the partition still holds
        network.heal("w")
        await asyncio.sleep(5)
        assert peer.got == [(10, 0), (10, 1), (10, 2)]

    run(main())


def test_duplicates_come_later_also_after_other_messages():
    async def main():
        network = SimulatedNetwork(latency=0.1, seed=5)
        controller, peer = Controller(network), Peer(network, "w")
        network.duplicate("w", 0.5, within_s=3.0)
        for k in range(200):
            peer.send(k)
            await asyncio.sleep(0.1)
        network.duplicate("w", 0.0)
        peer.send("once")
        await asyncio.sleep(10)
        got = controller.of("w")
        firsts = list(dict.fromkeys(got))
        assert firsts == [*range(200), "once"]
        counts = network.statistics
        assert 70 < counts.duplicated < 130
        assert counts.sent + counts.duplicated == counts.delivered == len(got)
        behind = [got[:k][-1] - got[k] for k in range(1, len(got)) if got[k] in got[:k] and got[k - 1] != "once"]
        assert max(behind) > 5  # a copy that came after later messages

    run(main())


def score(text):
    return messages.TrajectoryScored(trajectory_id="0.0", reward=1.0, response_text=text, error="")


def test_the_codec_copies_and_refuses_what_is_no_message():
    async def main():
        network = SimulatedNetwork(latency=1.0, through_codec=True)
        controller, peer = Controller(network), Peer(network, "w")
        array = np.arange(3, dtype=np.int32)
        sent = messages.ScoreTrajectory(
            trajectory_id="0.0",
            source="s",
            prompt_text="",
            answer="",
            metadata="{}",
            token_ids=array,
            turn_start=0,
            turn_end=3,
        )
        await controller.send(b"w", sent)
        array[:] = 9
        peer.send(score("up"))
        await asyncio.sleep(2)
        got = peer.got[0][1]
        assert got is not sent
        assert got.token_ids.tolist() == [0, 1, 2]
        assert controller.of("w") == [score("up")]
        with pytest.raises(CodecError):
            peer.send("no message")

    run(main())


def test_without_the_codec_the_object_itself_is_handed_over():
    async def main():
        network = SimulatedNetwork()
        controller, peer = Controller(network), Peer(network, "w")
        message = score("up")
        peer.send(message)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert controller.of("w")[0] is message

    run(main())


def test_the_trace_sees_every_delivery():
    async def main():
        log = []
        network = SimulatedNetwork(latency=1.0, trace=lambda *entry: log.append(entry))
        controller, peer = Controller(network), Peer(network, "w")
        peer.send("up")
        await asyncio.sleep(0.5)
        await controller.send(b"w", "down")
        await asyncio.sleep(5)
        assert log == [(1.0, "w -> controller", "up"), (1.5, "controller -> w", "down")]

    run(main())


def test_a_workers_failure_is_not_the_controllers():
    async def main():
        network = SimulatedNetwork()

        def fails(message):
            raise ZeroDivisionError("in a worker")

        network.connect("w", fails)
        await network.controller.send(b"w", "down")
        await asyncio.sleep(1)

    with pytest.raises(TaskDied, match="ZeroDivisionError: in a worker"):
        run(main())


def test_awaitable_workers_and_their_leaving():
    async def main():
        network = SimulatedNetwork(latency=1.0)
        worker = network.worker("w")
        await worker.send("hello")
        assert await network.controller.receive() == (b"w", "hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await worker.receive()
        await network.controller.send(b"w", "welcome")
        assert await worker.receive() == "welcome"
        await worker.send("bye")
        worker.close()
        assert await network.controller.receive() == (b"w", "bye")
        assert await network.controller.receive() == (b"w", PeerClosed(reason="its connection closed"))
        with pytest.raises(PeerGone):
            await network.controller.send(b"w", "too late")
        with pytest.raises(PeerGone):
            await network.controller.send(b"stranger", "?")
        with pytest.raises(ValueError, match="no peer stranger has ever connected"):
            network.partition("stranger")
        waiting = asyncio.create_task(network.controller.receive())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two coroutines read one inbox"):
            await network.controller.receive()
        waiting.cancel()

    run(main())


async def storm(seed):
    """Random faults and messages; checks order and counts, returns the log."""
    rng = random.Random(seed)
    log = []
    network = SimulatedNetwork(
        latency=jittered_latency(0.0, rng.choice([0.0, 0.5]), random.Random(seed)),
        seed=seed,
        trace=lambda at, route, message: log.append(f"{at!r} {route} {message}"),
    )
    controller = Controller(network)
    names = [f"w{k}" for k in range(4)]
    peers = {name: Peer(network, name) for name in names}
    sent = dict.fromkeys(names, 0)
    duplicated = set()
    for k in range(300):
        name = rng.choice(names)
        match rng.randrange(12):
            case 0:
                rng.choice([network.partition, network.hang])(name)
            case 1 | 2:
                rng.choice([network.heal, network.resume])(name)
            case 3:
                network.slow(name, factor=rng.choice([1, 5]), extra_s=rng.choice([0.0, 1.0]))
            case 4 if rng.random() < 0.2:
                network.duplicate(name, 0.3)
                duplicated.add(name)
            case 5 if rng.random() < 0.1:
                network.disconnect(name, deliver_sent=rng.random() < 0.5)
            case 6:
                await asyncio.sleep(rng.random())
            case _:
                peers[name].send(sent[name])
                sent[name] += 1
                if network.is_connected(name):
                    await controller.send(name.encode(), k)
    for name in names:
        network.heal(name)
        network.resume(name)
    await asyncio.sleep(100)
    counts = network.statistics
    assert network.under_way == 0
    assert counts.delivered == len(log)
    for name, peer in peers.items():
        down, up = [message for _, message in peer.got], controller.of(name)
        assert down == sorted(set(down))
        firsts = list(dict.fromkeys(up))
        assert firsts == list(range(len(firsts)))
        assert name in duplicated or len(up) == len(firsts)
        assert not network.is_connected(name) or len(firsts) == sent[name]
        heard_and_gone = bool(up) and not network.is_connected(name)
        assert [gone for _, gone in controller.closed].count(name) == heard_and_gone
    return [*log, *(f"{at!r} {name} closed" for at, name in controller.closed)]


def test_order_and_counts_hold_in_any_storm():
    lengths = [len(run(storm(seed))) for seed in range(60)]
    assert sum(lengths) > 5_000


def test_the_log_of_a_storm_is_the_same_in_every_process():
    script = "from tests.simulation.channels.test_network import *; print('\\n'.join(run(storm(7))))"
    logs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    assert logs[0] == logs[1] == "\n".join(run(storm(7))) + "\n"


@pytest.mark.parametrize("through_codec", [False, True])
def test_the_controller_runs_on_it_in_virtual_time(tmp_path, through_codec):
    logs = []

    def network():
        logs.append([])
        return SimulatedNetwork(
            latency=jittered_latency(0.01, 0.02, random.Random(1)),
            through_codec=through_codec,
            trace=lambda at, route, message: logs[-1].append(f"{at!r} {route} {type(message).__name__}"),
        )

    async def main():
        run = await test_controller.Run(fakes.experiment(), tmp_path, network()).to_the_end()
        return [step.step for step in run.of(event_types.StepFinished)], now()

    (steps, seconds), again = run(main()), run(main())
    assert steps == [1, 2, 3]
    assert 0.1 < seconds < 20
    assert again == (steps, seconds)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 50
