"""However a run ends, nothing of it is left: no process, no port, no file in shared memory or among the temporary ones."""

import json
import re
import shutil
import signal

import pytest

from tests.launch.live_run import LiveRun, all_listening, nothing_left, write_config

SMALL = {"rollout__replicas": 1, "relay__count": 1}


@pytest.fixture
def start(tmp_path, runs):
    async def start(model, **overrides):
        (tmp_path / "tmp").mkdir()
        config, name = write_config(tmp_path, model, **SMALL, **overrides)
        run = await LiveRun(config, tmp_path / "run", name).start(TMPDIR=str(tmp_path / "tmp"))
        runs.append(run)
        return run

    return start


def check_nothing_is_left(run, tmp_path, sockets):
    nothing_left(run)
    assert [str(path) for path in (tmp_path / "tmp").rglob("*")] == []
    assert not sockets & all_listening()


async def test_after_all_steps(start, model, tmp_path):
    run = await start(model, trainer__steps=3)
    await run.line(r"^ *1/")
    sockets = run.listening()
    assert len(sockets) >= 2  # the controller's, a relay's
    assert await run.end() == 0, run.output
    check_nothing_is_left(run, tmp_path, sockets)


async def test_after_sigterm(start, model, tmp_path):
    run = await start(model, trainer__steps=100000)
    await run.line(r"^ *1/")
    sockets = run.listening()
    run.process.send_signal(signal.SIGTERM)
    assert await run.end() == 0, run.output
    assert "as asked" in run.output
    check_nothing_is_left(run, tmp_path, sockets)


async def test_after_a_failure_during_the_start(start, model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    run = await start(broken)
    assert await run.end() in (1, 2), run.output
    check_nothing_is_left(run, tmp_path, set())


async def test_after_a_failure_in_the_middle_of_a_step(start, model, tmp_path):
    run = await start(model, trainer__steps=100000, reward__function="varied_reward:failing", reward__on_invalid="fail")
    await run.line(r"rollout-0 is ready")
    sockets = run.listening()
    assert await run.end() == 1, run.output
    assert "out of the question" in run.output
    assert re.search(r"accounts: \d+ prompts: .*\(the sums are right\)", run.output)
    accounts = json.loads((run.run_dir / "accounts.json").read_text())
    assert accounts["problems"] == [] and accounts["in_flight"] > 0
    check_nothing_is_left(run, tmp_path, sockets)
