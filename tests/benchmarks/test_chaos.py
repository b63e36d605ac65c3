"""The chaos benchmark counts right, and a real run that is struck a few times loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import chaos
import chaos_accounts
import pytest

from tests.launch import live_run
from tests.launch.live_run import write_config
from tests.tiny_models import make_model


def trained(step, *ids, versions=((0, 0),), reward=0.5):
    return [
        {
            "id": one,
            "prompt_id": int(one.partition(".")[0]),
            "step": step,
            "versions": [list(version) for version in versions],
            "reward": reward,
            "dropped": None,
        }
        for one in ids
    ]


def dropped(*ids):
    return [{**line, "step": None, "dropped": "stale"} for line in trained(None, *ids)]


def count(folder, lines, events=(), prompts=4):
    for name, entries in (("trajectories", lines), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return chaos_accounts.accounts(folder, prompts=prompts, groups_per_step=2, group_size=1)


def test_all_trained_once(tmp_path):
    found = count(tmp_path, trained(1, "0.0", "1.0") + trained(2, "2.0", "3.0", reward=1.0))
    assert (found.trained, found.lost, found.duplicated, found.mixed_versions) == (4, 0, 0, 0)
    assert (found.steps, found.lost_steps, found.reward_final) == (2, 0, 0.75)


def test_what_was_trained_in_a_lost_step_counts_when_it_is_trained_again_only(tmp_path):
    first = trained(1, "0.0", "1.0") + trained(2, "2.0", "3.0")
    found = count(tmp_path, first + trained(2, "2.0", "3.0"))
    assert (found.lost, found.duplicated, found.steps, found.lost_steps) == (0, 0, 2, 1)
    found = count(tmp_path, first + trained(1, "0.0", "1.0"))  # and then it ended
    assert (found.lost, found.duplicated, found.steps, found.lost_steps) == (2, 0, 1, 2)


def test_a_prompt_that_nobody_trained_is_lost_and_one_with_a_reason_is_not(tmp_path):
    rejected = {"event": "PromptRejected", "prompt_id": 3}
    found = count(tmp_path, trained(1, "0.0", "1.0"), [rejected])
    assert (found.lost, found.dropped) == (1, 1)
    found = count(tmp_path, trained(1, "0.0", "1.0") + dropped("2.0"), [rejected])
    assert (found.lost, found.dropped) == (0, 2)


def test_a_trajectory_in_two_steps_and_one_of_two_versions_are_found(tmp_path):
    found = count(tmp_path, trained(1, "0.0", "1.0") + trained(2, "1.0", "2.0", versions=((0, 0), (1, 5))))
    assert (found.duplicated, found.mixed_versions, found.lost) == (1, 2, 1)


@pytest.mark.timeout(900)
async def test_nothing_is_lost_when_processes_are_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), str(Path(live_run.__file__).parent)]))
    rounds, steps = 10, 450
    make_model(tmp_path / "tiny", seed=0)
    config, _ = write_config(
        tmp_path,
        tmp_path / "tiny",
        data__source={"type": "jsonl", "path": str(tmp_path / "data.jsonl"), "shuffle": False},
        data__epochs=1,
        rollout__max_response_tokens=40,
        reward__function="varied_reward:reward",
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{k:05d}", "answer": "x"}) + "\n" for k in range(4 * steps)))
    scale = chaos.Scale(config=Path(config), groups_per_step=4, group_size=2, prompts_key=None)
    figures = await chaos.measure_chaos(rounds, 49, chaos.KINDS, scale, tmp_path / "runs", steps, compare=False)
    assert all(figures["strikes"].values()), "the data was used up before each kind was struck"
    assert (figures["lost"], figures["duplicated"], figures["mixed_versions"], figures["dropped"]) == (0, 0, 0, 0)
    assert figures["steps"] == steps
    for kind in chaos.KINDS:
        assert (figures["recovery_s_max"][kind] is not None) == (figures["recoveries"][kind] > 0)
