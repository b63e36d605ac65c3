"""Prescribed, long-tailed lengths of responses: log-normal, drawn by the trajectory's id, so that they are the same in every run."""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import dataclass
from math import exp, log

VARIABLE = "LAMINAR_BENCH_LENGTHS"  # "median p99 seed pace_s"
P99 = 2.3263  # standard deviations above the median


@dataclass(kw_only=True, slots=True, frozen=True)
class Tail:
    """Lengths of responses, in tokens."""

    median: float
    p99: float
    seed: int
    pace_s: float = 0.0  # shortest decode step

    def tokens(self, trajectory_id: str) -> int:
        """Of this trajectory."""
        chance = random.Random(zlib.crc32(f"{self.seed}/{trajectory_id}".encode()))
        return max(2, round(self.median * exp(chance.gauss(0.0, log(self.p99 / self.median) / P99))))

    def variable(self) -> str:
        """For the environment of the worker."""
        return f"{self.median} {self.p99} {self.seed} {self.pace_s}"

    @classmethod
    def of_environment(cls) -> Tail:
        """What the benchmark wants."""
        median, p99, seed, pace_s = os.environ[VARIABLE].split()
        return cls(median=float(median), p99=float(p99), seed=int(seed), pace_s=float(pace_s))
