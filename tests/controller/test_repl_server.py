from __future__ import annotations

import asyncio
import contextlib
import json
import stat

import pytest

from laminar.config.schema import ScheduleConfig
from laminar.controller import repl_commands
from laminar.controller.checkpoints import Checkpoint
from laminar.controller.controller import Controller
from laminar.controller.repl_commands import COMMANDS
from laminar.controller.repl_server import MAX_LINE_BYTES, ReplServer
from laminar.controller.run_view import RunView
from laminar.observability.events import MetricsReported, Notice, TrajectoryScored
from laminar.trajectory import Turn
from tests.run_parts import HandView, a_metrics_line


@contextlib.asynccontextmanager
async def serving(view):
    """A server that listens, and is cancelled at the end as the controller does it."""
    server = ReplServer(view)
    task = asyncio.create_task(server.serve_forever())
    async with asyncio.timeout(10):
        await server.listening.wait()
    try:
        yield server
    finally:
        task.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, line):
        self.writer.write(line)
        await self.writer.drain()
        return await self.receive()

    async def receive(self):
        async with asyncio.timeout(10):
            return json.loads(await self.reader.readline())

    async def ask(self, command):
        return await self.send(json.dumps({"command": command}).encode() + b"\n")


async def connect(path):
    return Client(*await asyncio.open_unix_connection(str(path), limit=1 << 24))


@pytest.fixture
def view(tmp_path):
    return HandView(tmp_path)


@pytest.fixture
async def client(view):
    async with serving(view):
        client = await connect(view.run_dir / "repl.sock")
        yield client
        client.writer.close()


async def test_socket_is_the_owners_alone_and_goes_with_the_run(view):
    path = view.run_dir / "repl.sock"
    async with serving(view):
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert list(view.run_dir.iterdir()) == []


async def test_a_socket_left_by_a_dead_run_is_replaced(view):
    async with serving(view):
        (view.run_dir / "repl.sock").rename(view.run_dir / "kept")
    (view.run_dir / "kept").rename(view.run_dir / "repl.sock")
    async with serving(view):
        assert (await (await connect(view.run_dir / "repl.sock")).ask("status"))["ok"]


async def test_a_long_path_gets_a_socket_elsewhere(tmp_path):
    run_dir = tmp_path / ("long" * 30)
    run_dir.mkdir()
    async with serving(HandView(run_dir)):
        path = type(run_dir)((run_dir / "repl.path").read_text())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (await (await connect(path)).ask("status"))["ok"]
    assert not path.parent.exists() and list(run_dir.iterdir()) == []


async def test_a_run_goes_on_without_a_socket(tmp_path, monkeypatch):
    view, notices = HandView(tmp_path / "gone"), []
    view.events.subscribe(notices.append, Notice)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    await ReplServer(view).serve_forever()
    assert "laminar attach will not work" in notices[0].text
    assert list(tmp_path.iterdir()) == []


async def test_status(client, view):
    view.registry.waiting_for = ["rollout-1 (loading the model)"]
    view.events.emit(MetricsReported(line=a_metrics_line(3)))
    answer = await client.ask("status")
    assert answer["ok"]
    lines = dict(line.split(maxsplit=1) for line in answer["text"].splitlines())
    assert lines["run"] == f"small in {view.run_dir}, 1 min 06 s"
    assert lines["state"] == "running; waiting for rollout-1 (loading the model)"
    assert lines["step"] == "3 of 4, policy version 3"
    assert lines["groups"] == "1 in progress, 1 ready, 0 trained"
    assert "last step  reward 0.7500" in answer["text"]
    assert answer["data"]["elapsed_s"] == 66.0 and answer["data"]["metrics"]["step"] == 3


async def test_rollouts(client):
    answer = await client.ask("rollouts")
    header, first, second = answer["text"].splitlines()
    assert header.split()[:4] == ["rollout", "version", "health", "state"]
    assert " ".join(first.split()) == "rollout-0 3 healthy generating 0 1 0 7 50 % 600 100 100 % 0 host-a 31"
    assert " ".join(second.split()) == "rollout-1 2 healthy generating 1 1 1 7 50 % 600 100 100 % 1 - -"
    assert answer["data"][1]["waiting"] == 1


async def test_rollouts_before_there_are_any(client, view):
    view.rollouts.replicas.clear()
    view.registry.waiting_for = ["rollout-0 (not connected)"]
    answer = await client.ask("rollouts")
    assert answer["text"] == "no rollout is ready yet; waiting for rollout-0 (not connected)"


async def test_fleet(client, view):
    view.fleet.health.heard("rollout-1", 80.0, 100.0)
    view.fleet.health.evicted_hosts["host-b"] = "it burns"
    answer = await client.ask("fleet")
    rows = [" ".join(line.split()) for line in answer["text"].splitlines()]
    assert rows[0] == "rollout health for heard failures host why"
    assert rows[2:] == ["rollout-1 suspect 6.0 s - 0 host-a silent for 20.0 s", "", "evicted host host-b it burns"]
    assert answer["data"]["rollouts"][0]["health"] == "healthy"


async def test_rollouts_are_added_drained_and_removed(client, view):
    assert (await client.ask("add 2"))["text"].startswith("starting rollout-2, rollout-3")
    assert (await client.ask("drain 1"))["text"] == "rollout-1 finishes 1 trajectories and leaves"
    assert (await client.ask("remove rollout-0"))["data"] == {"rollout": "rollout-0", "trajectories": 0}
    assert view.fleet.asked == [("add", 2), ("rollout-1", None), ("rollout-0", 0)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("add many", "'many' is no number of rollouts; expected: add [COUNT], 1 to 256"),
        ("add 0", "'0' is no number"),
        ("drain", "which one? expected: drain ROLLOUT, one of rollout-0, rollout-1"),
        ("remove 7", "no rollout '7' is in this run"),
        ("remove rolout-1", "no rollout 'rolout-1' is in this run; did you mean rollout-1?"),
    ],
)
async def test_rollouts_that_cannot_come_or_leave(client, view, line, text):
    answer = await client.ask(line)
    assert not answer["ok"] and answer["text"].startswith(text)
    assert view.fleet.asked == []


async def test_the_last_rollout_stays(client, view):
    view.fleet.health.leaves("rollout-0", 100.0, "drained")
    assert "rollout-1 is the only rollout that is left" in (await client.ask("remove 1"))["text"]


async def test_rollouts_that_are_started_by_hand_are_added_by_hand(client, view):
    view.fleet.by_hand = True
    text = (await client.ask("add 2"))["text"]
    assert f"scripts/launch/rollouts.sh {view.run_dir} 2 2" in text and "--index 2" in text


async def test_relays(client):
    answer = await client.ask("relays")
    lines = answer["text"].splitlines()
    assert lines[0] == "published version 3, broadcast under way: version 3, broadcasts: 4"
    assert lines[3].split() == ["relay-0", "master", "tcp", "3", "0", "-", "-", "host-a", "21"]
    assert lines[4].split() == ["relay-1", "hop", "1", "tcp", "2", "1", "-", "-", "host-a", "22"]


async def test_trainer(client, view):
    view.trainer.clock.enter("training")
    view.now.now += 2
    view.trainer.checkpoints.newest = Checkpoint(step=2, path="checkpoints/step-000002", policy_version=2)
    text = (await client.ask("trainer"))["text"]
    assert "step        3 of 4" in text and "checkpoints/step-000002" in text
    assert ["trajectories", "6", "75", "%"] in [line.split() for line in text.splitlines()]
    assert ["trainer-0", "host-a", "11", "up"] in [line.split() for line in text.splitlines()]


async def test_buffer(client):
    answer = await client.ask("buffer")
    rows = [line.split() for line in answer["text"].splitlines()]
    assert ["4", "2", "ready", "2/2", "2/2", "6", "0.5", "spell_backward"] in rows
    assert ["5", "3", "in", "progress", "1/2", "1/2", "6", "1", "spell_backward"] in rows
    assert answer["data"]["by_version"] == {"2": 1, "3": 1}


async def test_trajectory(client, view):
    listed = await client.ask("trajectory")
    assert [entry["trajectory"] for entry in listed["data"]] == ["5.1", "5.0", "4.1", "4.0"]
    running = await client.ask("trajectory 5.1")
    assert running["data"]["state"] == "generating" and running["data"]["rollout"] == "rollout-1"
    assert running["data"]["generation_s"] == 6.0 and running["data"]["lease"] == 2
    scored = view.history["4.0"]
    view.events.emit(TrajectoryScored(trajectory=scored, response_text="4\x1b[2J"))
    text = (await client.ask("trajectory 4.0"))["text"]
    assert "prompt:\nspell 4 backward" in text and "response:\n4\\x1b[2J" in text
    assert "token ids        7 8 9\n" in text and "reward           1.0\n" in text


async def test_a_trajectory_of_several_turns_shows_them(client, view):
    running = view.history["5.1"]
    running.turns.append(Turn(start=0, end=5, observation_end=8, reward=0.25, seconds=1.23456))
    answer = await client.ask("trajectory 5.1")
    assert answer["data"]["turns"] == [
        {"turn": 1, "first token": 0, "tokens": 5, "observation": 3, "reward": 0.25, "seconds": 1.235}
    ]
    assert "observation" in answer["text"]


async def test_an_old_trajectory_that_is_still_in_the_buffer_is_found(client, view):
    view.history.clear()
    assert (await client.ask("trajectory 4.1"))["data"]["state"] == "buffered"
    missing = await client.ask("trajectory 9.9")
    assert not missing["ok"] and "no trajectory '9.9' is known" in missing["text"]


async def test_pause_and_resume(client, view):
    assert (await client.ask("pause generation"))["data"] == {"generation": True, "training": False}
    assert view.control.generation_paused and view.control.training_allowed.is_set()
    await client.ask("pause")
    assert not view.control.training_allowed.is_set()
    assert "state     paused: generation, training" in (await client.ask("status"))["text"]
    await client.ask("resume training")
    assert view.control.generation_paused and view.control.training_allowed.is_set()
    assert (await client.ask("resume"))["data"] == {"generation": False, "training": False}
    wrong = await client.ask("pause everything")
    assert wrong["text"] == "unknown part 'everything'; expected: pause [generation|training]"


async def test_stop(client, view):
    view.trainer.clock.enter("training")
    answer = await client.ask("stop")
    assert answer["text"] == "the run ends after step 4 with a checkpoint"
    assert view.control.stop_requested.is_set()
    assert (await client.ask("status"))["data"]["stopping"]


async def test_help_names_every_command(client):
    answer = await client.ask("help")
    assert [entry["name"] for entry in answer["data"]] == list(COMMANDS)
    lines = [line.split(maxsplit=2) for line in answer["text"].splitlines()]
    assert ["pause", "[generation|training]", "start no new prompts and/or steps"] in lines


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("rolouts", "unknown command 'rolouts'; did you mean rollouts?"),
        ("xyzzy", "unknown command 'xyzzy'; known are status, "),
        ("", "no command was given"),
        ("status now", "too many arguments; expected: status"),
        ("trajectory 'a", "cannot be read: No closing quotation"),
    ],
)
async def test_mistakes_are_answered(client, line, text):
    answer = await client.ask(line)
    assert not answer["ok"] and answer["text"].startswith(text) and answer["data"] is None


@pytest.mark.parametrize("line", [b"status\n", b"[1]\n", b'{"command": 3}\n', b"\xff\xfe\n"])
async def test_lines_that_are_no_request_are_answered(client, line):
    assert not (await client.send(line))["ok"]
    assert (await client.ask("help"))["ok"]


async def test_a_line_too_long_ends_that_client_only(client, view):
    other = await connect(view.run_dir / "repl.sock")
    answer = await client.send(b"x" * (MAX_LINE_BYTES + 1) + b"\n")
    assert answer == {"ok": False, "text": f"a line may have {MAX_LINE_BYTES} bytes", "data": None}
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await client.reader.read() == b""
    assert (await other.ask("status"))["ok"]


async def test_two_clients_at_once(client, view):
    other = await connect(view.run_dir / "repl.sock")
    answers = await asyncio.gather(*(one.ask("help") for one in (client, other)))
    assert answers[0] == answers[1] and answers[0]["ok"]
    other.writer.close()
    assert (await client.ask("status"))["ok"]


async def test_clients_see_the_end_of_the_run(view):
    async with serving(view):
        client = await connect(view.run_dir / "repl.sock")
        assert (await client.ask("status"))["ok"]
    async with asyncio.timeout(10):
        assert await client.reader.read() == b""


async def test_repack_says_what_would_be_moved_and_why_not_more(client, view):
    answer = await client.ask("repack plan")
    assert answer["data"]["moves"] == [{"source": "rollout-1", "target": "rollout-0"}]
    assert answer["data"]["reasons"] == {"rollout-0": "it takes in others"}
    for text in (
        "it takes in others",
        "frees it for some 40.0 s, costs the target 3.0 s",
        "7 trajectories (fitted)",
        "2 rollouts",
    ):
        assert text in answer["text"], answer["text"]
    assert view.repacker.asked == 0
    assert (await client.ask("repack"))["data"] == {"asked": 2}
    assert view.repacker.asked == 1
    assert "expected: repack [plan]" in (await client.ask("repack all"))["text"]
    assert [row["B"] for row in (await client.ask("rollouts"))["data"]] == [7, 7]


async def test_repack_is_refused_where_no_rollout_can_be_emptied(client, view):
    view.config = view.config.model_copy(update={"schedule": ScheduleConfig(name="partial")})
    assert "schedule.name: partial" in (await client.ask("repack"))["text"]
    assert [row["B"] for row in (await client.ask("rollouts"))["data"]] == [None, None]


async def test_a_bug_in_a_command_does_not_end_the_run(client, view, monkeypatch):
    notices = []
    view.events.subscribe(notices.append, Notice)
    command = repl_commands.Command(arguments="", help="", function=lambda *_: 1 / 0)
    monkeypatch.setitem(repl_commands.COMMANDS, "status", command)
    answer = await client.ask("status")
    assert not answer["ok"] and "ZeroDivisionError" in answer["text"] and notices[0].level == "warning"
    assert (await client.ask("help"))["ok"]


async def test_the_controller_has_all_that_the_repl_looks_at(tmp_path):
    view = HandView(tmp_path)
    controller = Controller(
        view.config,
        None,
        view.events,
        run_id="r",
        run_dir=tmp_path,
        expected_workers=["trainer-0"],
        restart=None,
    )
    names = {name for name in vars(RunView) if not name.startswith("_")}
    assert names and all(hasattr(controller, name) for name in names)
    async with serving(controller):
        client = await connect(tmp_path / "repl.sock")
        for command in (
            "status",
            "rollouts",
            "relays",
            "trainer",
            "buffer",
            "trajectory",
            "repack plan",
            "repack",
            "help",
        ):
            answer = await client.ask(command)
            assert answer["ok"], answer["text"]
