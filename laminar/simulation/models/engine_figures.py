"""What all engines of a run did during the measured steps, as sums."""

from __future__ import annotations

from collections.abc import Mapping

from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.engine_statistics import EngineStatistics


def engine_figures(
    engines: Mapping[str, RooflineEngine],
    at_start: Mapping[str, EngineStatistics],
    at_end: Mapping[str, EngineStatistics],
) -> tuple[dict[str, float], float | None]:
    """Sums over engines between two moments, by the names of `EngineStatistics`, and their mean KV utilization.

    Engines that were not there all the time, because their process was started anew, are left out; None: all of them.
    """
    totals: dict[str, float] = {}
    utilizations = []
    for name, after in at_end.items():
        before = at_start.get(name)
        if before is None:
            continue
        gained = EngineStatistics(
            **{key: getattr(after, key) - getattr(before, key) for key in EngineStatistics.__slots__}
        )
        if gained.decode_seconds < 0:
            continue
        for key in EngineStatistics.__slots__:
            totals[key] = totals.get(key, 0.0) + getattr(gained, key)
        utilizations.append(gained.mean_kv_utilization(engines[name].kv_capacity))
    return totals, sum(utilizations) / len(utilizations) if utilizations else None
