"""The paper's figures that a study can be held against, and what the study says instead.

Figures are of the Laminar paper (arXiv 2510.12633); those with `from_notes` come from public notes on it, not from its
text. Nothing in the models is tuned to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from laminar.simulation.study import study_figures
from laminar.simulation.study.study_figures import Ours
from laminar.simulation.study.study_result import MATH, TOOLS, StudyResult

PAPER = "Laminar paper, arXiv 2510.12633"
NOTES = "public notes on the Laminar paper"
TOLERANCE = 0.15  # a larger difference wants an explanation


@dataclass(kw_only=True, slots=True, frozen=True)
class PaperFigure:
    """One figure of the paper."""

    key: str  # stable name, of explanations too
    what: str
    value: float
    unit: str  # "x" | "%" | "s" | "" (a count)
    claim: Literal["equal", "at_most", "at_least"]  # what the paper says of the value
    from_notes: bool
    ours: Callable[[StudyResult], Ours | None]  # None: the study has not run the cases that it needs
    not_simulated: str = ""  # why no study can have it

    @property
    def source(self) -> str:
        """Where it is from."""
        return NOTES if self.from_notes else PAPER


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """A figure of the paper beside ours."""

    figure: PaperFigure
    ours: Ours | None
    explanation: str

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.ours is None else self.ours.value / self.figure.value

    @property
    def differs(self) -> bool:
        """Ours is off by more than `TOLERANCE`, in the direction that contradicts the paper."""
        if self.ratio is None:
            return False
        above, below = self.ratio > 1 + TOLERANCE, self.ratio < 1 - TOLERANCE
        return {"equal": above or below, "at_most": above, "at_least": below}[self.figure.claim]

    @property
    def unexplained(self) -> bool:
        """It differs and nobody has said why."""
        return self.differs and not self.explanation


def compare(result: StudyResult, explanations: Mapping[str, str]) -> list[Comparison]:
    """All figures beside the study's, in the order of `PAPER_FIGURES`; explanations by key of the figure."""
    return [
        Comparison(figure=figure, ours=figure.ours(result), explanation=explanations.get(figure.key, ""))
        for figure in PAPER_FIGURES
    ]


def _figure(
    key: str,
    what: str,
    value: float,
    unit: str,
    ours: Callable[[StudyResult], Ours | None],
    *,
    claim: Literal["equal", "at_most", "at_least"] = "equal",
    from_notes: bool = True,
    not_simulated: str = "",
) -> PaperFigure:
    return PaperFigure(
        key=key,
        what=what,
        value=value,
        unit=unit,
        claim=claim,
        from_notes=from_notes,
        ours=ours,
        not_simulated=not_simulated,
    )


LEARNING = "needs learning: the modelled trainer learns nothing"

PAPER_FIGURES: tuple[PaperFigure, ...] = (
    _figure(
        "math_over_synchronous",
        "math: mean speed-up over verl (synchronous)",
        2.56,
        "x",
        study_figures.mean_speed_up("synchronous", MATH),
    ),
    _figure(
        "math_over_synchronous_max",
        "math: largest speed-up over verl (synchronous)",
        5.48,
        "x",
        study_figures.max_speed_up("synchronous", MATH),
    ),
    _figure(
        "math_over_one_step",
        "math: mean speed-up over one-step staleness",
        1.98,
        "x",
        study_figures.mean_speed_up("one_step", MATH),
    ),
    _figure(
        "math_over_stream",
        "math: mean speed-up over stream generation",
        1.93,
        "x",
        study_figures.mean_speed_up("stream", MATH),
    ),
    _figure(
        "math_over_partial",
        "math: mean speed-up over AReaL (partial rollout)",
        1.39,
        "x",
        study_figures.mean_speed_up("partial", MATH),
    ),
    _figure(
        "tools_over_synchronous",
        "tools: mean speed-up over verl (synchronous)",
        2.62,
        "x",
        study_figures.mean_speed_up("synchronous", TOOLS),
    ),
    _figure(
        "scaling_efficiency",
        "math: scaling efficiency, smallest to largest size",
        53.7,
        "%",
        study_figures.efficiency(None),
    ),
    _figure("scaling_efficiency_32b", "math: scaling efficiency, 32B", 68.2, "%", study_figures.efficiency("32B")),
    _figure(
        "generation_share",
        "math: share of a synchronous step that is generation",
        83.1,
        "%",
        study_figures.generation_share,
        from_notes=False,
    ),
    _figure(
        "length_skew",
        "99th percentile of response length over its median",
        10,
        "x",
        study_figures.length_skew,
        claim="at_most",
        from_notes=False,
    ),
    _figure(
        "wait_for_weights",
        "largest saving in a rollout's wait for weights against global synchronization",
        47,
        "%",
        study_figures.wait_for_weights,
    ),
    _figure(
        "publish_stall_32b",
        "32B: training stands still for a publish",
        0.64,
        "s",
        study_figures.weights(study_figures.publish_stall, "32B"),
    ),
    _figure(
        "publish_stall_72b",
        "72B: training stands still for a publish",
        1.40,
        "s",
        study_figures.weights(study_figures.publish_stall, "72B"),
    ),
    _figure(
        "broadcast_72b",
        "72B: broadcast to 127 relays",
        1.6,
        "s",
        study_figures.weights(study_figures.broadcast, "72B"),
        claim="at_most",
        from_notes=False,
    ),
    _figure(
        "repack_throughput",
        "repack: gain in generation throughput",
        26,
        "%",
        study_figures.repack(study_figures.repack_gain, "%"),
    ),
    _figure(
        "repack_kv_off",
        "KV utilization without repack",
        71.6,
        "%",
        study_figures.repack(lambda off, on: off.kv_utilization, "%"),
    ),
    _figure(
        "repack_kv_on",
        "KV utilization with repack",
        82.2,
        "%",
        study_figures.repack(lambda off, on: on.kv_utilization, "%"),
    ),
    _figure(
        "repack_overhead",
        "repack: seconds that one takes",
        0.69,
        "s",
        study_figures.repack(study_figures.repack_overhead, "s"),
    ),
    _figure(
        "repack_latency",
        "repack: mean seconds of a trajectory, with over without",
        1,
        "x",
        study_figures.repack(study_figures.repack_latency, "x"),
        claim="at_most",
    ),
    _figure(
        "staleness_below_3",
        'share of the trajectories with staleness below 3 ("most")',
        50,
        "%",
        study_figures.staleness_below_3,
        claim="at_least",
    ),
    _figure("staleness_max", "largest staleness", 4, "", study_figures.staleness_max, claim="at_most"),
    _figure(
        "convergence_7b",
        "7B: time to converge, best other scheme over Laminar",
        1.77,
        "x",
        study_figures.nothing,
        not_simulated=LEARNING,
    ),
    _figure(
        "convergence_32b",
        "32B: time to converge, best other scheme over Laminar",
        1.59,
        "x",
        study_figures.nothing,
        not_simulated=LEARNING,
    ),
    _figure(
        "chain_rebuilt",
        "relay chain rebuilt after a death",
        1,
        "s",
        study_figures.nothing,
        claim="at_most",
        from_notes=False,
        not_simulated="a study injects no faults",
    ),
    _figure(
        "machine_lost",
        "machine with two rollouts lost: back to full strength",
        252,
        "s",
        study_figures.nothing,
        not_simulated="a study injects no faults",
    ),
)
