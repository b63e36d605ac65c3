"""`laminar eval` on real parts, and what it refuses before anything starts."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.launch.evaluate import FoundModel, evaluation_config, find_model
from tests.launch.live_run import LiveRun, write_config
from tests.tiny_models import make_model


def held_out(folder):
    words = [str(11**k)[:5] for k in range(3, 15)]
    file = folder / "held-out.jsonl"
    file.write_text("".join(json.dumps({"prompt": word, "answer": word[::-1]}) + "\n" for word in words))
    return {"source": {"type": "jsonl", "path": str(file), "shuffle": False}, "every": 2, "share": 0.5}


async def test_a_checkpoint_alone_answers_as_the_run_that_wrote_it(tmp_path):
    """Greedy, and so the same: the weights that were published and those that were exported are the same."""
    make_model(tmp_path / "model", seed=0)
    config, name = write_config(tmp_path, tmp_path / "model", trainer__steps=2, evaluation=held_out(tmp_path))
    run = await LiveRun(config, tmp_path / "run", name).start()
    assert await run.end() == 0, run.output
    assert run.output.count("evaluation of step ") == 2  # 0 and 2
    assert "evaluation        pass@1 " in run.output
    lines = [line for line in run.lines("metrics.jsonl") if "evaluation" in line]
    assert [line["step"] for line in lines] == [0, 2]
    assert [line["evaluation_prompts"] for line in lines] == [12, 12]
    told = [line["event"] for line in run.lines("events.jsonl") if line["event"].startswith("Evaluation")]
    assert told == ["EvaluationStarted", "EvaluationFinished"] * 2

    checkpoint = run.run_dir / "checkpoints" / "step-000002"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "laminar", "eval", str(config), "--checkpoint", str(checkpoint), "--json", "-"),
        *("--run-dir", str(tmp_path / "eval")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = (part.decode() for part in await asyncio.wait_for(process.communicate(), 240))
    assert process.returncode == 0, errors
    figures = json.loads(output)
    assert (figures["step"], figures["prompts"], figures["checkpoint"]) == (2, 12, str(checkpoint))
    assert "pass@1" in errors and "trainer-0" not in errors and "relay-0" not in errors
    assert run.processes() == [] and run.shared_memory() == []

    def responses(folder):
        return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]

    in_the_run = [one for one in responses(run.run_dir) if one["policy_version"] == lines[1]["policy_version"]]
    alone = responses(tmp_path / "eval")
    assert [one["response"] for one in alone] == [one["response"] for one in in_the_run]
    assert [one["reward"] for one in alone] == [one["reward"] for one in in_the_run]


def checkpoint(folder, *, marker='{"step": 7}'):
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    if marker is not None:
        (folder / "complete.json").write_text(marker)
    return folder


def test_a_checkpoint_and_a_model_folder_both_hold_a_model(tmp_path):
    folder = checkpoint(tmp_path / "step-000007")
    assert find_model(folder) == FoundModel(base=folder / "huggingface", step=7)
    assert find_model(folder / "huggingface") == FoundModel(base=folder / "huggingface")


def test_adapters_are_found_with_their_base_model(tmp_path):
    folder = tmp_path / "step-000007"
    (folder / "adapter").mkdir(parents=True)
    (folder / "complete.json").write_text('{"step": 7}')
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/models/base"}')
    assert find_model(folder) == FoundModel(base=Path("/models/base"), adapter=folder / "adapter", step=7)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_config.json is damaged: KeyError"):
        find_model(folder)


def test_what_holds_no_model_is_refused_with_the_nearest_that_does(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_model(tmp_path / "nowhere")
    checkpoint(tmp_path / "checkpoints" / "step-000003")
    newest = checkpoint(tmp_path / "checkpoints" / "step-000006")
    with pytest.raises(UserError, match=f"neither a complete checkpoint nor .* did you mean {newest}"):
        find_model(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="neither a complete checkpoint"):
        find_model(checkpoint(tmp_path / "partial", marker=None))
    with pytest.raises(UserError, match=r"complete.json is damaged"):
        find_model(checkpoint(tmp_path / "damaged", marker="{}"))


def test_a_config_without_held_out_prompts_is_refused(tmp_path):
    config = ExperimentConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "models/none"},
            "data": {"source": {"type": "jsonl", "path": "none.jsonl"}},
            "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )
    with pytest.raises(UserError, match="evaluation: the config has no such section"):
        evaluation_config(config, tmp_path)
