"""What a prefill and a KV move cost on this rollout, measured as they happen: the planner weighs one against the other."""

from __future__ import annotations

HALF_LIFE = 4.0  # measurements: a newer one weighs as much as what came before it, that long ago
LEAST_TOKENS = 16  # of a prefill: below, the cost of a pass stands for more than that of its tokens


class MoveCosts:
    """Seconds per token, means that forget. An end of a move that was not seen here counts as much as the other."""

    def __init__(self) -> None:
        self._prefill = _Mean()
        self._export = _Mean()
        self._import = _Mean()

    @property
    def prefill_s_per_token(self) -> float:
        """Of context; 0: not measured yet."""
        return self._prefill.value

    @property
    def kv_move_s_per_token(self) -> float:
        """Export and import; 0: neither measured yet."""
        exported, imported = self._export.value, self._import.value
        return (exported or imported) + (imported or exported)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of that many tokens in all."""
        if tokens >= LEAST_TOKENS:
            self._prefill.add(seconds / tokens)

    def exported(self, tokens: int, seconds: float) -> None:
        """A trajectory's KV was written."""
        if tokens:
            self._export.add(seconds / tokens)

    def imported(self, tokens: int, seconds: float) -> None:
        """A trajectory's KV was read."""
        if tokens:
            self._import.add(seconds / tokens)


class _Mean:
    def __init__(self) -> None:
        self.value = 0.0

    def add(self, measured: float) -> None:
        weight = 1.0 - 0.5 ** (1.0 / HALF_LIFE)
        self.value = measured if self.value == 0.0 else self.value + weight * (measured - self.value)
