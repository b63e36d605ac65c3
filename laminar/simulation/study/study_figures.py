"""A study's own figures where the paper has one: functions of a `StudyResult` that say None without the needed cases.

Percentages are of 100; speed-ups and ratios are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.simulation.records.record import RunRecord
from laminar.simulation.study.study_result import MATH, Case, Ratio, StudyResult

Figure = Callable[[StudyResult], "Ours | None"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Ours:
    """A study's own figure."""

    value: float
    of: str  # which cases it follows from


def mean_speed_up(over: str, workload: str) -> Figure:
    """Of `laminar` over another schedule, mean over the settings of a workload."""
    return lambda result: _mean(result.speed_up("laminar", over, workload=workload))


def max_speed_up(over: str, workload: str) -> Figure:
    """The same in the best of the settings."""
    return lambda result: _max(result.speed_up("laminar", over, workload=workload))


def efficiency(model: str | None) -> Figure:
    """Scaling efficiency from the smallest to the largest size, mean over the models, or of one ("32B")."""

    def ours(result: StudyResult) -> Ours | None:
        ratios = result.scaling_efficiency("laminar", workload=MATH)
        largest = {ratio.setting.model: ratio for ratio in ratios}  # sizes grow: the last one of a model stays
        return _mean([one for name, one in largest.items() if model is None or _is(name, model)], percent=True)

    return ours


def wait_for_weights(result: StudyResult) -> Ours | None:
    """How much less a rollout waits per pull than under `synchronous`, in the best of the settings."""
    savings = []
    for setting in result.settings():
        mine, theirs = result.case(setting, "laminar"), result.case(setting, "synchronous")
        if mine and theirs and (wait := mine.record.weights.wait_s) is not None and theirs.record.weights.wait_s:
            savings.append(Ratio(setting=setting, value=1 - wait / theirs.record.weights.wait_s))
    return _max(savings, percent=True)


def repack(value: Callable[[RunRecord, RunRecord], float | None], unit: str) -> Figure:
    """A value of the records (without, with) repack, mean over the settings in which both ran."""

    def ours(result: StudyResult) -> Ours | None:
        values = [
            Ratio(setting=off.setting, value=found)
            for off, on in result.repack_pairs()
            if off.schedule == "laminar" and (found := value(off.record, on.record)) is not None
        ]
        return _mean(values, percent=unit == "%")

    return ours


def weights(value: Callable[[RunRecord], float | None], model: str) -> Figure:
    """A value of the record of the `laminar` case of this model ("72B") with the most relays."""

    def ours(result: StudyResult) -> Ours | None:
        cases = [case for case in _laminar(result) if _is(case.model, model) and value(case.record) is not None]
        if not cases:
            return None
        case = max(cases, key=lambda case: case.relays)
        found = value(case.record)
        return None if found is None else Ours(value=found, of=f"{case.setting}, {case.relays} relays")

    return ours


def staleness_below_3(result: StudyResult) -> Ours | None:
    """Share of the trajectories, all settings together."""
    cases = _laminar(result)
    below = sum(n for case in cases for value, n in case.record.staleness.items() if value < 3)
    total = sum(sum(case.record.staleness.values()) for case in cases)
    return Ours(value=100 * below / total, of=f"{total} trajectories, {len(cases)} runs") if total else None


def staleness_max(result: StudyResult) -> Ours | None:
    """Of any trajectory."""
    return _max([Ratio(setting=case.setting, value=case.record.staleness_max) for case in _laminar(result)])


def generation_share(result: StudyResult) -> Ours | None:
    """Share of a synchronous step in which the trainer waits for trajectories, mean over the settings."""
    cases = [result.case(setting, "synchronous") for setting in result.settings() if setting.workload == MATH]
    return _mean(
        [Ratio(setting=case.setting, value=case.record.trainer_idle_fraction) for case in cases if case], percent=True
    )


def length_skew(result: StudyResult) -> Ours | None:
    """99th percentile over median of the response lengths, largest of the settings."""
    lengths = [
        Ratio(setting=case.setting, value=case.record.response_tokens.p99 / case.record.response_tokens.p50)
        for case in _laminar(result)
        if case.record.response_tokens.p50
    ]
    return _max(lengths)


def nothing(result: StudyResult) -> Ours | None:
    """For figures that no study can have."""
    return None


def _laminar(result: StudyResult) -> list[Case]:
    cases = [result.case(setting, "laminar") for setting in result.settings()]
    return [case for case in cases if case is not None]


def _is(model: str, size: str) -> bool:
    return size.lower() in model.lower().replace("_", "-").split("-")


def _mean(ratios: Sequence[Ratio], *, percent: bool = False) -> Ours | None:
    if not ratios:
        return None
    value = sum(ratio.value for ratio in ratios) / len(ratios)
    of = str(ratios[0].setting) if len(ratios) == 1 else f"mean of {len(ratios)} settings"
    return Ours(value=100 * value if percent else value, of=of)


def _max(ratios: Sequence[Ratio], *, percent: bool = False) -> Ours | None:
    if not ratios:
        return None
    best = max(ratios, key=lambda ratio: ratio.value)
    return Ours(value=100 * best.value if percent else best.value, of=str(best.setting))


def repack_gain(off: RunRecord, on: RunRecord) -> float | None:
    """Generated tokens per second, relative gain."""
    return on.generated_tokens_per_s / off.generated_tokens_per_s - 1


def repack_latency(off: RunRecord, on: RunRecord) -> float | None:
    """Mean time of a trajectory, with over without."""
    return on.trajectory_s.mean / off.trajectory_s.mean


def repack_overhead(off: RunRecord, on: RunRecord) -> float | None:
    """Mean seconds of a repack; None if there was none."""
    return on.repack.overhead_s if on.repack.repacks else None


def publish_stall(record: RunRecord) -> float | None:
    """Mean seconds."""
    return record.weights.publish_stall_s


def broadcast(record: RunRecord) -> float | None:
    """Mean seconds."""
    return record.weights.broadcast_s
