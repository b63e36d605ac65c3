"""How long decode steps and prefills of one replica take: the roofline, and its sums in closed form.

A step with N running trajectories that attend to K tokens of KV cache takes

    max( (weights + kv_bytes K) / bandwidth , (2 P N + attention_flops K) / flops ) + overhead(N)

and K grows by N with every step, so the time of n steps is a sum over the larger of two straight lines: two quadratic
pieces at most. Invariant: `whole_steps` is the exact inverse of `seconds` on the floats that `seconds` returns.
"""

from __future__ import annotations

import math

from laminar.simulation.models.hardware import Constants, GpuSpec
from laminar.simulation.models.language_models import BF16_BYTES, ModelSpec


class Steps:
    """n decode steps of a batch that does not change: step i takes `base + slope * i` seconds, with one change of line."""

    __slots__ = ("_base", "_late_base", "_late_slope", "_slope", "_turn", "_turn_seconds")

    def __init__(self, base: float, slope: float, turn: int | None, late_base: float, late_slope: float) -> None:
        self._base = base
        self._slope = slope
        self._turn = turn  # first step on the second line, or None
        self._late_base = late_base
        self._late_slope = late_slope
        self._turn_seconds = turn * base + slope * (turn * (turn - 1) // 2) if turn is not None else math.inf

    def seconds(self, n: int) -> float:
        """Seconds of the first n steps."""
        turn = self._turn
        if turn is None or n <= turn:
            return n * self._base + self._slope * (n * (n - 1) // 2)
        pairs = (n * (n - 1) - turn * (turn - 1)) // 2
        return self._turn_seconds + (n - turn) * self._late_base + self._late_slope * pairs

    def whole_steps(self, seconds: float) -> int:
        """Steps completed within this time."""
        if seconds <= 0:
            return 0
        if seconds <= self._turn_seconds:
            n = int(_quadratic_root(self._base, self._slope, seconds))
        else:
            turn = self._turn or 0
            rest = seconds - self._turn_seconds
            n = turn + int(_quadratic_root(self._late_base + self._late_slope * turn, self._late_slope, rest))
        # The root is exact but for rounding: settle on what `seconds` says.
        while self.seconds(n + 1) <= seconds:
            n += 1
        while n > 0 and self.seconds(n) > seconds:
            n -= 1
        return n

    def steps_to_reach(self, seconds: float) -> int:
        """Steps until at least this time has passed; none if it is not positive."""
        n = self.whole_steps(seconds)  # 0 where seconds <= 0, and seconds(0) = 0
        return n if self.seconds(n) >= seconds else n + 1

    def integral(self, n: int, start: float, growth: float) -> float:
        """Integral over the first n steps of a quantity that is `start + growth * i` during step i."""
        turn = self._turn
        if turn is None or n <= turn:
            return _moment(0, n, self._base, self._slope, start, growth)
        return _moment(0, turn, self._base, self._slope, start, growth) + _moment(
            turn, n, self._late_base, self._late_slope, start, growth
        )


class StepCosts:
    """The roofline of one replica."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, constants: Constants) -> None:
        bandwidth = tensor_parallel * gpu.memory_bandwidth * constants.decode_bandwidth_share
        flops = tensor_parallel * gpu.peak_flops * constants.prefill_flops_share
        self._weights_s = model.read_bytes / bandwidth
        self._kv_s = model.replica_kv_bytes_per_token(tensor_parallel) / bandwidth  # per token of KV cache
        self._token_s = 2 * model.multiplied_parameters / flops  # per token through the weights
        self._attention_s = model.attention_flops / flops  # per token and token of context
        host_link = tensor_parallel * gpu.host_link_bandwidth * constants.host_link_share
        self._kv_copy_s = model.replica_kv_bytes_per_token(tensor_parallel) / host_link  # per token, one way
        self._overhead_s = constants.step_overhead_s
        self._overhead_per_running_s = 0.0
        if tensor_parallel > 1:
            # Two all-reduces per layer, each of one hidden vector per running trajectory; a ring sends 2 (t - 1) / t of it.
            ring = 2 * (tensor_parallel - 1) / tensor_parallel
            link = gpu.nvlink_bandwidth / 2 * constants.all_reduce_bandwidth_share
            self._overhead_s += 2 * model.layers * constants.all_reduce_latency_s
            self._overhead_per_running_s = 2 * model.layers * ring * BF16_BYTES * model.hidden / link

    def steps(self, running: int, kv_tokens: int) -> Steps:
        """Steps of `running` trajectories that together attend to `kv_tokens` tokens in the first of them."""
        overhead = self._overhead_s + running * self._overhead_per_running_s
        memory = self._weights_s + self._kv_s * kv_tokens + overhead
        memory_slope = self._kv_s * running
        compute = self._token_s * running + self._attention_s * kv_tokens + overhead
        compute_slope = self._attention_s * running
        if memory >= compute:
            low, low_slope, high, high_slope = compute, compute_slope, memory, memory_slope
        else:
            low, low_slope, high, high_slope = memory, memory_slope, compute, compute_slope
        if low_slope <= high_slope:
            return Steps(high, high_slope, None, 0.0, 0.0)
        turn = math.ceil((high - low) / (low_slope - high_slope))
        return Steps(high, high_slope, turn, low, low_slope)

    def prefill_seconds(self, tokens: int, cached: int) -> float:
        """Prefill of `tokens` tokens behind `cached` tokens whose KV is there already."""
        end = cached + tokens
        return self._token_s * tokens + self._attention_s * (end * end - cached * cached) / 2

    def kv_import_seconds(self, tokens: int) -> float:
        """From the host's memory into the KV cache, instead of a prefill. The export is hidden behind the source's decoding."""
        return self._kv_copy_s * tokens


def _quadratic_root(base: float, slope: float, seconds: float) -> float:
    """n with n base + slope n (n - 1) / 2 = seconds, in the form that does not cancel for a small slope."""
    linear = base - slope / 2
    return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * slope * seconds))


def _moment(first: int, last: int, base: float, slope: float, start: float, growth: float) -> float:
    """Sum over i in [first, last) of (base + slope i) (start + growth i)."""
    ones = last - first
    indices = (last * (last - 1) - first * (first - 1)) // 2
    squares = (_pyramid(last) - _pyramid(first)) // 6
    return ones * base * start + indices * (base * growth + slope * start) + squares * slope * growth


def _pyramid(n: int) -> int:
    """Six times the sum of squares below n."""
    return (n - 1) * n * (2 * n - 1)
