"""One run to explore: a config, a workload and the faults that are thrown at it, all drawn from a seed.

Invariant: the seed alone decides, through one numpy generator, in every process and on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.simulation.faults.fault import Fault, from_json, to_json


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkloadFigures:
    """What the modelled workers need to know beside the config."""

    seed: int
    prompts: int | None  # the data ends after so many positions; None: never
    prompt_tokens: int  # median
    prompt_tokens_p99: int  # above data.max_prompt_tokens: some prompts are rejected
    response_tokens: int  # median
    response_tokens_p99: int
    latency_s: float  # of a message
    latency_jitter_s: float  # uniform, on top
    tool_calls: int = 0  # of a trajectory, at most; each ends a turn
    tool_s: float = 1.0  # median of what one takes


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultSchedule:
    """Everything that a run depends on."""

    seed: int
    config: ExperimentConfig
    workload: WorkloadFigures
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        """One line; only what differs from the config's defaults."""
        return json.dumps(
            {
                "seed": self.seed,
                "config": self.config.model_dump(mode="json", exclude_defaults=True),
                "workload": asdict(self.workload),
                "faults": [to_json(fault) for fault in self.faults],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> FaultSchedule:
        """The schedule that `to_json` was asked for."""
        tree: Mapping[str, Any] = json.loads(text)
        return cls(
            seed=tree["seed"],
            config=ExperimentConfig.model_validate(tree["config"]),
            workload=WorkloadFigures(**tree["workload"]),
            faults=tuple(from_json(entry) for entry in tree["faults"]),
        )
