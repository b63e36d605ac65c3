from __future__ import annotations

import pytest

from laminar.controller.schedules.make_schedule import max_staleness
from tests.simulation.study_files import cases_of, refusal


def test_every_schedule_meets_every_model_and_size(tmp_path):
    cases = cases_of(
        tmp_path,
        "models=[Qwen2.5-7B, {shape: Qwen2.5-32B, sizes: [32]}]",
        "sizes=[16, 24]",
        "schedules=[one_step, laminar]",
    )
    assert [(case.models.model.name, case.models.gpus, case.label) for case in cases] == [
        ("Qwen2.5-7B", 16, "one_step"),
        ("Qwen2.5-7B", 16, "laminar"),
        ("Qwen2.5-7B", 24, "one_step"),
        ("Qwen2.5-7B", 24, "laminar"),
        ("Qwen2.5-32B", 32, "one_step"),
        ("Qwen2.5-32B", 32, "laminar"),
    ]


def test_without_a_list_all_schedules_run_and_laminar_with_repack_as_well(tmp_path):
    assert [(case.label, case.experiment.repack.enabled) for case in cases_of(tmp_path)] == [
        ("synchronous", False),
        ("one_step", False),
        ("stream", False),
        ("partial", False),
        ("laminar", False),
        ("laminar", True),
    ]


def test_weights_travel_as_the_schedules_own_systems_do_it(tmp_path):
    sync = {case.label: case.models.weight_sync for case in cases_of(tmp_path)}
    assert sync.pop("laminar") == "relays"
    assert set(sync.values()) == {"global"}
    (case,) = cases_of(tmp_path, "schedules=[{name: one_step, weights: relays}]")
    assert case.models.weight_sync == "relays"


def test_options_of_a_schedule_reach_its_experiment(tmp_path):
    (case,) = cases_of(
        tmp_path, "schedules=[{name: one_step, max_staleness: 3, split: 4, max_running: 12, label: deep}]", "steps=7"
    )
    experiment = case.experiment
    assert case.label == "deep"
    assert (max_staleness(experiment), experiment.trainer.steps, experiment.rollout.max_running) == (3, 7, 12)
    assert (case.models.trainer_gpus, experiment.rollout.replicas) == (4, 12)


def test_figures_of_ones_own_in_place_of_presets(tmp_path):
    gpu = "{name: X, memory_gb: 200, memory_bandwidth_gb_s: 8000, peak_tflops: 2000, nvlink_gb_s: 900, host_link_gb_s: 64}"
    shape = "{name: mine, layers: 2, hidden: 64, query_heads: 4, kv_heads: 2, head_dim: 16, intermediate: 128, vocabulary: 1000}"
    case = cases_of(tmp_path, f"hardware.gpu={gpu}", f"models=[{{shape: {shape}}}]", "hardware.nic_gbit_s=200")[0]
    assert (case.models.gpu.name, case.models.gpu.memory_bandwidth) == ("X", 8e12)
    assert (case.models.model.name, case.models.model.layers) == ("mine", 2)
    assert case.models.constants.nic_bandwidth == 25e9


def test_relays_are_one_per_rollout_host_and_the_master(tmp_path):
    (case,) = cases_of(tmp_path, "sizes=[64]", "schedules=[{name: laminar, split: 24}]")
    assert case.experiment.relay.count == 1 + 5


def test_a_model_that_does_not_fit_is_refused_with_the_degree_that_fits(tmp_path):
    text = refusal(tmp_path, "models=[{shape: Qwen2.5-72B, tensor_parallel: 1}]", "sizes=[64]")
    assert "Qwen2.5-72B" in text
    assert "set tensor_parallel to 4 or more" in text or "set tensor_parallel to 2 or more" in text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["models=[Qwen2.5-8B]"], "did you mean Qwen2.5-7B?"),
        (["hardware.gpu=H8000"], "did you mean H800?"),
        (["sizes=[1]"], "1 GPUs are too few for one rollout beside a trainer"),
        (["models=[Qwen2.5-72B]", "sizes=[4]"], "do not hold one rollout of tensor_parallel 8"),
        (
            ["models=[{shape: Qwen2.5-32B, tensor_parallel: 4}]", "sizes=[30]"],
            "not whole rollouts of tensor_parallel 4",
        ),
        (["split=16"], "split: 16; of 16 GPUs 16 train and 0 are left, not enough for one rollout"),
        (["split=20"], "of 16 GPUs 20 train and 0 are left"),
        (["split=shared"], "rollouts and trainer work at the same time"),
        (["split=4", "models=[Qwen2.5-32B]"], "expected 590 GB, 10 GPUs or more"),
        (["workload.lengths={file: none.txt}"], "none.txt cannot be read"),
        (["workload.lengths.file=none.txt"], "file and median and p99 are both given"),
        (["workload.lengths={median: 10}"], "p99 and maximum missing"),
        (["workload.lengths.p99=10"], "lengths.p99"),
        (["schedules=[{name: synchronous, max_staleness: 2}]"], "`synchronous` has no staleness"),
        (["schedules=[{name: partial, repack: true}]"], "repack.enabled: true"),
        (["schedules=[laminar, {name: laminar, max_staleness: 2}]"], "`laminar` is there twice"),
        (["batch.mini_batches=3"], "trainer.mini_batches: 3; expected a divisor of trainer.groups_per_step (8)"),
        (["steps=1"], "steps: 1; expected more than warm_up_steps + cool_down_steps (1)"),
        (["buffer.capacity=1", "schedules=[laminar]"], "buffer.capacity: 1; expected at least 8"),
        (["rollout.max_running=2"], "rollout.max_running: 2; expected at least trainer.group_size (4)"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, overrides, says):
    assert says in refusal(tmp_path, *overrides)


def test_an_empty_file_of_lengths_is_refused(tmp_path):
    (tmp_path / "lengths.txt").write_text("\n")
    assert "lengths.txt is empty" in refusal(tmp_path, f"workload.lengths={{file: {tmp_path}/lengths.txt}}")


def test_all_impossible_cases_are_named_at_once(tmp_path):
    text = refusal(tmp_path, "models=[Qwen2.5-7B, Qwen2.5-72B]", "sizes=[1, 16]", "schedules=[laminar]")
    assert "3 mistakes" in text
    for where in ("Qwen2.5-7B, 1 GPUs", "Qwen2.5-72B, 1 GPUs", "Qwen2.5-72B, 16 GPUs"):
        assert where in text
