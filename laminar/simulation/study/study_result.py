"""What a study found: its assumptions, one record per case, and the comparisons between them.

Invariant: comparisons are between cases of one setting (model, GPUs, workload). Where a schedule ran there with several
splits of the GPUs, its fastest stands for it, as a user would choose; with repack, if it ran with it at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.simulation.records.record import RunRecord

# In the order in which they are shown: key -> name for a person. A schedule of a user's own follows under its own name.
SCHEDULES = {
    "synchronous": "synchronous",
    "one_step": "one-step staleness",
    "stream": "stream generation",
    "partial": "partial rollout",
    "laminar": "Laminar",
}
MATH = "math"  # workloads that the paper has figures for
TOOLS = "tools"


@dataclass(kw_only=True, slots=True, frozen=True)
class Assumption:
    """A constant of the models, and where it comes from."""

    name: str
    value: float | str
    unit: str
    source: str


@dataclass(kw_only=True, slots=True, frozen=True, order=True)
class Setting:
    """What is the same for all schedules that are compared."""

    workload: str
    model: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, {self.workload}"


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """One simulated run."""

    model: str
    gpus: int
    rollout_gpus: int
    trainer_gpus: int  # with `rollout_gpus` more than `gpus`: they take turns on the same GPUs
    tensor_parallel: int
    relays: int
    workload: str
    schedule: str
    repack: bool
    record: RunRecord

    @property
    def setting(self) -> Setting:
        """What it may be compared within."""
        return Setting(workload=self.workload, model=self.model, gpus=self.gpus)

    @property
    def split(self) -> str:
        """How the GPUs are divided, for a person."""
        if self.rollout_gpus + self.trainer_gpus > self.gpus:
            return f"{self.gpus} shared"
        return f"{self.rollout_gpus}+{self.trainer_gpus}"


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """A comparison within one setting."""

    setting: Setting
    value: float


@dataclass(kw_only=True, slots=True, frozen=True)
class StudyResult:
    """Everything that the reports show."""

    name: str
    description: str  # what was simulated, a few sentences for a person
    assumptions: list[Assumption]
    cases: list[Case] = field(default_factory=list)

    def settings(self) -> list[Setting]:
        """All settings: workloads and models in the order of the cases, then by size."""
        workloads = _in_order([case.workload for case in self.cases])
        models = _in_order([case.model for case in self.cases])
        settings = {case.setting for case in self.cases}
        return sorted(settings, key=lambda one: (workloads.index(one.workload), models.index(one.model), one.gpus))

    def schedules(self) -> list[str]:
        """The schedules that ran, in the order in which they are shown."""
        ran = _in_order([case.schedule for case in self.cases])
        return [name for name in SCHEDULES if name in ran] + [name for name in ran if name not in SCHEDULES]

    def case(self, setting: Setting, schedule: str, *, repack: bool | None = None) -> Case | None:
        """The case that stands for a schedule (see the module's text); None if it did not run there."""
        cases = [case for case in self.cases if case.setting == setting and case.schedule == schedule]
        if repack is None:
            repack = any(case.repack for case in cases)
        cases = [case for case in cases if case.repack == repack]
        return max(cases, key=lambda case: case.record.trained_tokens_per_s, default=None)

    def cases_of(self, setting: Setting) -> list[Case]:
        """One case per schedule, in the order in which they are shown."""
        found = [self.case(setting, schedule) for schedule in self.schedules()]
        return [case for case in found if case is not None]

    def speed_up(self, schedule: str, over: str, *, workload: str | None = None) -> list[Ratio]:
        """Trained tokens per second of one schedule over another's, for each setting in which both ran."""
        ratios = []
        for setting in self.settings():
            mine, theirs = self.case(setting, schedule), self.case(setting, over)
            if mine and theirs and workload in (None, setting.workload):
                value = mine.record.trained_tokens_per_s / theirs.record.trained_tokens_per_s
                ratios.append(Ratio(setting=setting, value=value))
        return ratios

    def scaling_efficiency(self, schedule: str, *, workload: str | None = None) -> list[Ratio]:
        """Throughput at N GPUs over N / N0 times that at N0, the smallest size of the same model and workload."""
        smallest: dict[tuple[str, str], Case] = {}
        ratios = []
        for setting in self.settings():
            case = self.case(setting, schedule)
            if case is None or workload not in (None, setting.workload):
                continue
            base = smallest.setdefault((setting.model, setting.workload), case)
            if case is not base:
                linear = base.record.trained_tokens_per_s * case.gpus / base.gpus
                ratios.append(Ratio(setting=setting, value=case.record.trained_tokens_per_s / linear))
        return ratios

    def repack_pairs(self) -> list[tuple[Case, Case]]:
        """(without, with) repack, otherwise alike, wherever both ran; the same split of the GPUs in both."""
        pairs = []
        for case in self.cases:
            for other in self.cases:
                if not case.repack and other.repack and _alike(case, other):
                    pairs.append((case, other))
        return pairs


def _alike(case: Case, other: Case) -> bool:
    return (
        case.setting == other.setting
        and case.schedule == other.schedule
        and (case.rollout_gpus, case.trainer_gpus, case.tensor_parallel)
        == (other.rollout_gpus, other.trainer_gpus, other.tensor_parallel)
    )


def _in_order(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
