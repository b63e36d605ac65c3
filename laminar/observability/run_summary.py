"""What a run amounts to: totals from the events, and the summary at the end.

Seconds per state are those of the state clocks, so the causes of idleness add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.evaluation_result import EvaluationResult
from laminar.observability.events import (
    CheckpointFinished,
    EvaluationFinished,
    EventBus,
    GroupDropped,
    MetricsReported,
    PromptRejected,
    RepackSettled,
    RolloutsRepacked,
    StepFinished,
    TokensAppended,
    WeightsBroadcast,
    WeightsPublished,
    WeightsPulled,
)
from laminar.observability.plain_text import data_size, duration, percent, short_number
from laminar.observability.states import ROLLOUT_BUSY, TRAINER_BUSY

ENDS = 3  # steps whose mean is the first and the last reward
RATES = ("generated_tokens_per_s", "trained_tokens_per_s", "kv_utilization_mean")


class RunSummary:
    """Counts what happens; `rows` is the summary."""

    def __init__(self, events: EventBus, now: Callable[[], float]) -> None:
        """`now` is the controller's clock, in seconds."""
        self.rewards: list[float] = []  # reward_mean of each step
        self.step_seconds: list[float] = []
        self.rejected_prompts = 0
        self.dropped_groups = 0
        self.resampled_groups = 0
        self.checkpoint: CheckpointFinished | None = None
        self.evaluations: list[EvaluationResult] = []
        self._now = now
        self._started = now()
        self._first_step_after: float | None = None
        self._trajectories = 0
        self._response_tokens = 0
        self._longest_response = 0
        self._trained_tokens = 0  # prompts included
        self._generated = 0
        self._late = 0
        self._staleness: Counter[int] = Counter()
        self._seconds: dict[str, dict[str, float]] = {"trainer": {}, "rollout": {}}  # per state
        self._rate_sums = dict.fromkeys(RATES, 0.0)  # each rate times the seconds that it held for
        self._stalls: list[float] = []
        self._broadcasts: list[float] = []
        self._failed_broadcasts = 0
        self._wire_shares: list[float] = []  # bytes on the wire over bytes of a version
        self._repairs = 0
        self._pulls: list[float] = []
        self._nbytes = 0
        self._moves: list[RolloutsRepacked] = []
        self._settled: list[RepackSettled] = []
        events.subscribe(self._on_metrics, MetricsReported)
        events.subscribe(self._on_step, StepFinished)
        events.subscribe(self._on_tokens, TokensAppended)
        events.subscribe(self._on_weights, WeightsPublished, WeightsBroadcast, WeightsPulled)
        events.subscribe(lambda event: self._moves.append(event), RolloutsRepacked)
        events.subscribe(lambda event: self._settled.append(event), RepackSettled)
        events.subscribe(lambda event: self.evaluations.append(event.result), EvaluationFinished)
        events.subscribe(self._on_other, PromptRejected, GroupDropped, CheckpointFinished)

    def _on_metrics(self, event: MetricsReported) -> None:
        line: dict[str, Any] = event.line
        self.rewards.append(line["reward_mean"])
        self.step_seconds.append(line["step_s"])
        for rate in RATES:
            self._rate_sums[rate] += line.get(rate, 0.0) * line["step_s"]
        for part, totals in self._seconds.items():
            for state, seconds in line.get(f"{part}_seconds", {}).items():
                totals[state] = totals.get(state, 0.0) + seconds

    def _on_step(self, event: StepFinished) -> None:
        if self._first_step_after is None:
            self._first_step_after = self._now() - self._started
        for group in event.groups:
            self._trained_tokens += len(group.trajectories) * len(group.prompt.token_ids)
            for trajectory in group.trajectories:
                self._trajectories += 1
                self._response_tokens += trajectory.num_tokens
                self._longest_response = max(self._longest_response, trajectory.num_tokens)
                self._staleness[trajectory.staleness or 0] += 1

    def _on_tokens(self, event: TokensAppended) -> None:
        self._generated += event.tokens
        self._late += event.late_tokens

    def _on_weights(self, event: WeightsPublished | WeightsBroadcast | WeightsPulled) -> None:
        if isinstance(event, WeightsPublished):
            self._stalls.append(event.publish_stall_s)
            self._nbytes = event.nbytes
        elif isinstance(event, WeightsPulled):
            self._pulls.append(event.seconds)
        elif event.error:
            self._failed_broadcasts += 1
        else:
            self._broadcasts.append(event.seconds)
            self._repairs += event.repairs
            if event.nbytes:
                self._wire_shares.append(event.received_bytes / event.nbytes)

    def _on_other(self, event: PromptRejected | GroupDropped | CheckpointFinished) -> None:
        if isinstance(event, PromptRejected):
            self.rejected_prompts += 1
        elif isinstance(event, GroupDropped):
            self.resampled_groups += event.resampled
            self.dropped_groups += not event.resampled
        elif not event.error:
            self.checkpoint = event

    def rows(self) -> list[tuple[str, str]]:
        """The summary as (what, how much); what there is nothing to say about is left out."""
        rows = [("wall time", self._wall_time())]
        if self.evaluations:
            rows.append(("evaluation", self._evaluation()))
        if self.rewards:
            rows += [("reward", self._reward()), *self._tokens(), ("staleness", self._staleness_shares())]
            rows += [(f"{part} idle", self._idle(part)) for part in self._seconds if sum(self._seconds[part].values())]
        if self._stalls:
            rows.append(("publish stall", f"{_mean_and_max(self._stalls)}, {data_size(self._nbytes)} each"))
        if self._broadcasts or self._failed_broadcasts:
            failed = f", {self._failed_broadcasts} failed" if self._failed_broadcasts else ""
            repairs = f", chain mended {self._repairs} times" if self._repairs else ""
            rows.append(("broadcast", f"{_mean_and_max(self._broadcasts)}{failed}{repairs}"))
        if self._wire_shares:
            mean = sum(self._wire_shares) / len(self._wire_shares)
            rows.append(("on the wire", f"{percent(mean)} of the weights' bytes"))
        if self._pulls:
            rows.append(("pull", f"{_mean_and_max(self._pulls)}, {len(self._pulls)} pulls"))
        if self._moves:
            rows.append(("repack", self._repack()))
        rows.append(("rejected prompts", str(self.rejected_prompts)))
        rows.append(("dropped groups", str(self.dropped_groups)))
        if self.resampled_groups:
            rows.append(("resampled groups", f"{self.resampled_groups}, whose rewards were all equal"))
        if self._late:
            rows.append(("late tokens", f"{short_number(self._late)} dropped"))
        return rows + self._checkpoint_rows()

    def _repack(self) -> str:
        moved = sum(move.trajectories for move in self._moves)
        tokens = short_number(sum(move.tokens for move in self._moves))
        text = f"{len(self._moves)} rollouts freed, {moved} trajectories moved with {tokens} tokens of context"
        if not self._settled:
            return text
        trajectories = max(1, sum(move.trajectories for move in self._settled))
        pause_s = sum(move.pause_s_mean * move.trajectories for move in self._settled) / trajectories
        kv_bytes = sum(move.kv_bytes for move in self._settled)
        if kv_bytes:
            text += f" ({data_size(kv_bytes)} of KV came along)"
        gained = short_number(sum(move.gained_tokens for move in self._settled))
        freed_s = duration(sum(move.freed_s for move in self._settled))
        return f"{text}, which paused for {duration(pause_s)} on average; freed rollouts generated {gained} tokens in {freed_s}"

    def _wall_time(self) -> str:
        text = duration(self._now() - self._started)
        if self._first_step_after is not None:
            text += f", first step after {duration(self._first_step_after)}"
        return text

    def _reward(self) -> str:
        first, last = self.rewards[:ENDS], self.rewards[-ENDS:]
        which = f"mean of the first and the last {ENDS} steps" if len(self.rewards) > ENDS else "mean of all steps"
        if len(self.rewards) <= ENDS:
            return f"{sum(last) / len(last):.4f} ({which})"
        return f"{sum(first) / ENDS:.4f} -> {sum(last) / ENDS:.4f} ({which})"

    def _evaluation(self) -> str:
        """pass@1 and pass@k of the first and the last one."""
        first, last = self.evaluations[0], self.evaluations[-1]

        def course(k: int) -> str:
            values = [f"{result.pass_at[k]:.4f}" for result in ([first] if first is last else [first, last])]
            return f"pass@{k} {' -> '.join(values)}"

        steps = f"step {first.step}" if first is last else f"steps {first.step} and {last.step}"
        return f"{', '.join(course(k) for k in dict.fromkeys((1, last.samples)))} ({steps}, {last.prompts} held-out prompts)"

    def _tokens(self) -> list[tuple[str, str]]:
        seconds = max(sum(self.step_seconds), 1e-9)
        rate = {name: short_number(total / seconds) for name, total in self._rate_sums.items()}
        trained = self._trained_tokens + self._response_tokens
        mean = self._response_tokens / max(1, self._trajectories)
        return [
            ("trajectories", f"{self._trajectories} trained"),
            ("response tokens", f"mean {short_number(mean)}, longest {self._longest_response}"),
            ("generated", f"{short_number(self._generated)} tokens, {rate['generated_tokens_per_s']} tokens/s"),
            ("trained", f"{short_number(trained)} tokens with prompts, {rate['trained_tokens_per_s']} tokens/s"),
            ("KV utilization", f"{percent(self._rate_sums['kv_utilization_mean'] / seconds)} on average"),
        ]

    def _staleness_shares(self) -> str:
        total = self._staleness.total()
        mean = sum(value * count for value, count in self._staleness.items()) / max(1, total)
        shares = ", ".join(f"{value}: {percent(count / total)}" for value, count in sorted(self._staleness.items()))
        return f"mean {mean:.2f}, max {max(self._staleness)} ({shares})"

    def _idle(self, part: str) -> str:
        busy = TRAINER_BUSY if part == "trainer" else ROLLOUT_BUSY
        shares = {state: seconds / sum(self._seconds[part].values()) for state, seconds in self._seconds[part].items()}
        causes = sorted(((share, state) for state, share in shares.items() if state not in busy and share > 0))
        text = percent(sum(share for share, _ in causes))
        if causes:
            text += f" ({', '.join(f'{state} {percent(share)}' for share, state in reversed(causes))})"
        return text

    def _checkpoint_rows(self) -> list[tuple[str, str]]:
        if self.checkpoint is None:
            return []
        size = f"{data_size(self.checkpoint.nbytes)}, written in {duration(self.checkpoint.seconds)}"
        rows = [("checkpoint", f"{self.checkpoint.path} ({size})")]
        if model := exported_model(Path(self.checkpoint.path)):
            rows.append(("load it", f'AutoModelForCausalLM.from_pretrained("{model}")'))
            rows.append(("serve it", f"vllm serve {model}"))
        elif adapter := exported_adapter(Path(self.checkpoint.path)):
            merge = f"python -m laminar.workers.trainer.merge_adapter {adapter} MERGED_FOLDER"
            rows.append(("load it", f'AutoModelForCausalLM.from_pretrained("{adapter}")  # base model and adapters'))
            rows.append(("merge it", merge))
        return rows


def exported_model(checkpoint: Path) -> Path | None:
    """The Hugging Face folder in a checkpoint: the one that holds a model's config.json."""
    candidates = [checkpoint, *sorted(checkpoint.glob("*/"))]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def exported_adapter(checkpoint: Path) -> Path | None:
    """The folder of adapters in a checkpoint (or that it is), where only these were trained."""
    candidates = [checkpoint, *sorted(checkpoint.glob("*/"))]
    return next((folder for folder in candidates if (folder / "adapter_config.json").is_file()), None)


def _mean_and_max(values: list[float]) -> str:
    if not values:
        return "none complete"
    return f"mean {duration(sum(values) / len(values))}, max {duration(max(values))}"
