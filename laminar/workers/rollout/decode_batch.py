"""Continuous batching on a Hugging Face causal language model: the working part of the torch engine.

Invariants: row i of the batch lives in slot i of the cache; a row's last token has been reported but is not in the cache
yet (the next step writes it), so a slot holds one token less than its trajectory. Finished rows leave after the step that
finished them, the last row takes their place, and waiting ones join by a prefill before the next step, or, with exported
KV, by a copy of it. Where trajectories have several turns, those that come back find what free slots still hold of them.

Everything here runs in one thread, which `TorchEngine` owns.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.errors import UserError
from laminar.workers.rollout import token_sampling
from laminar.workers.rollout.causal_model import CausalModel
from laminar.workers.rollout.decode_row import Row
from laminar.workers.rollout.engine import EngineLoad, EngineSettings, GenerationRequest, KvExported, KvImported
from laminar.workers.rollout.kept_prefixes import KeptPrefixes
from laminar.workers.rollout.kv_file import KvRefused
from laminar.workers.rollout.move_costs import MoveCosts
from laminar.workers.rollout.slot_cache import SlotCache
from laminar.workers.rollout.slot_transfer import SlotTransfer
from laminar.workers.rollout.step_times import StepTimes

log = logging.getLogger("laminar.rollout")

PREFILL_TOKENS = 8192  # in one forward pass, padding included (a longer prompt goes alone)
PREFILL_LOGITS = 1 << 26  # elements in one forward pass (256 MiB in float32)


class DecodeBatch:
    """The model, its cache, and the trajectories that wait and run."""

    def __init__(self, settings: EngineSettings, step_times: StepTimes) -> None:
        """Load the model and allocate the cache; the time of each decode step goes to `step_times`.

        Raises:
            UserError: the model cannot be loaded or run by this engine, or the cache is too small for one trajectory.
        """
        torch.set_num_threads(settings.threads)
        self.model = CausalModel(settings.model_path, settings.dtype, settings.context_tokens)
        row_bytes = self.model.kv_bytes_per_token * settings.context_tokens
        self.slots = min(settings.max_running, settings.kv_cache_bytes // row_bytes)
        if self.slots < 1:
            raise UserError(
                f"a KV cache of {settings.kv_cache_bytes} bytes holds no trajectory of {settings.context_tokens} tokens "
                f"({row_bytes} bytes each): give the rollout engine a larger KV cache or a shorter context"
            )
        if self.slots < settings.max_running:
            log.warning(
                "rollout.kv_cache_mib: room for %d trajectories of %d tokens at once, rollout.max_running is %d; the rest "
                "wait their turn. %d MiB would hold them all",
                *(self.slots, settings.context_tokens, settings.max_running),
                -(-settings.max_running * row_bytes // (1 << 20)),
            )
        self.positions = settings.context_tokens
        self.cache = SlotCache(
            self.model.kv_shapes,
            self.slots,
            self.positions,
            self.model.dtype,
            device=self.model.device,
        )
        self.transfer = SlotTransfer(self.model, self.cache)
        self.kept = KeptPrefixes(self.cache, self.slots) if settings.several_turns else None
        self.costs = MoveCosts()
        self._moves_kv = settings.moves_kv
        self.policy_version = -1
        self._step_times = step_times
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self._random = np.random.default_rng(settings.seed)
        # Per slot; the first len(self.rows) entries are in use.
        self._lengths = np.zeros(self.slots, np.int64)  # tokens in the cache
        self._last = np.zeros(self.slots, np.int64)  # the last token, not in the cache yet
        self._keys = np.zeros(self.slots, np.uint64)
        self._temperature = np.zeros(self.slots, np.float32)
        self._top_p = np.ones(self.slots, np.float32)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self.rows and not self.waiting

    def load(self) -> EngineLoad:
        """Load figures: the KV cache in use counts tokens, not slots."""
        used = int(self._lengths[: len(self.rows)].sum())
        return EngineLoad(
            running=len(self.rows),
            waiting=len(self.waiting),
            kv_utilization=used / (self.slots * self.positions),
            prefill_s_per_token=self.costs.prefill_s_per_token,
            kv_move_s_per_token=self.costs.kv_move_s_per_token,
        )

    def add(self, request: GenerationRequest) -> Row:
        """Queue a trajectory (checked before by `check_request`)."""
        row = Row(
            request=request,
            stop_token_ids=frozenset(request.stop_token_ids),
            left=request.max_new_tokens,
        )
        self.waiting.append(row)
        return row

    def abort(self, row: Row, export: Path | None = None) -> None:
        """End a trajectory with "abort", its KV written to `export`; does nothing if it has ended already."""
        if row.finish_reason is not None:
            return
        row.finish_reason = "abort"
        if row in self.waiting:
            self.waiting.remove(row)
            return
        slot = self.rows.index(row)
        if export is not None and self._moves_kv:
            self._export(row, slot, export)
        self._remove(slot)

    def _export(self, row: Row, slot: int, path: Path) -> None:
        started = time.perf_counter()
        tokens = int(self._lengths[slot])
        token_ids = np.concatenate([row.context(), np.array(row.token_ids, np.int32)])[:tokens]
        try:
            nbytes = self.transfer.write(slot, token_ids, self.policy_version, path)
        except OSError as error:  # no memory: it is prefilled where it goes on
            log.warning("KV of %s (%d tokens) was not exported: %s", row.request.request_id, tokens, error)
            return
        seconds = time.perf_counter() - started
        self.costs.exported(tokens, seconds)
        row.exported = KvExported(tokens=tokens, nbytes=nbytes, shards=1, seconds=seconds)

    def load_weights(self, path: str, policy_version: int) -> None:
        """Take a version's weights. Raises RuntimeError if a trajectory is here, ValueError if the file does not fit."""
        if not self.idle:
            raise RuntimeError(
                f"weights of version {policy_version} must wait: {len(self.rows)} trajectories are running"
            )
        self.model.load_weights(path)
        self.policy_version = policy_version
        if self.kept is not None:
            self.kept.clear()

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Let waiting trajectories join, then generate one token for each; returns those that finished."""
        finished = []
        while self.waiting and len(self.rows) < self.slots:
            if self.waiting[0].request.kv is not None and self.waiting[0].imported is None:
                self._import(self.waiting[0])
            elif (found := self._kept_of(self.waiting[0])) is not None:
                finished += self._extend(self.waiting.popleft(), *found)
            else:
                finished += self._prefill(self._next_to_join())
        if self.rows:
            running, kv_utilization = len(self.rows), self.load().kv_utilization
            started = time.perf_counter()
            finished += self._decode()
            self._step_times.add(running, time.perf_counter() - started, kv_utilization)
        return finished

    def _import(self, row: Row) -> None:
        """Let the row at the head join with the KV that came with it; if that does not fit, it is prefilled next."""
        path, context = row.request.kv, row.context()
        assert path is not None
        started = time.perf_counter()
        slot, tokens = len(self.rows), len(context) - 1
        self._make_room(1)
        try:
            if not self._moves_kv:
                raise KvRefused("this engine does not move KV")
            nbytes = self.transfer.read(slot, context, self.policy_version, path)
        except KvRefused as refusal:
            log.warning("KV of %s was not taken, it is prefilled: %s", row.request.request_id, refusal)
            row.imported = KvImported(tokens=0, nbytes=0, seconds=0.0, error=str(refusal))
            return
        self.cache.fill(slot, tokens)
        self.waiting.popleft()
        self.rows.append(row)
        self._lengths[slot] = tokens
        self._last[slot] = context[-1]
        self._set_sampling(np.array([slot]), [row])
        seconds = time.perf_counter() - started
        self.costs.imported(tokens, seconds)
        row.imported = KvImported(tokens=tokens, nbytes=nbytes, seconds=seconds, error="")

    def _next_to_join(self) -> list[Row]:
        """The next rows in order of arrival that fit into the free slots and one forward pass."""
        joining: list[Row] = []
        lengths: set[int] = set()
        while self.waiting and len(joining) < self.slots - len(self.rows):
            request = self.waiting[0].request
            if joining and request.kv is not None and self.waiting[0].imported is None:
                break
            if joining and self._kept_of(self.waiting[0]) is not None:
                break
            lengths.add(len(request.prompt_token_ids) + len(request.token_ids))
            count = len(joining) + 1
            logits = count * len(lengths) * self.model.vocabulary
            if joining and (count * max(lengths) > PREFILL_TOKENS or logits > PREFILL_LOGITS):
                break
            joining.append(self.waiting.popleft())
        return joining

    def _prefill(self, joining: list[Row]) -> list[Row]:
        """Put rows into free slots and generate their first token. Equal contexts (a group's) are computed once."""
        started = time.perf_counter()
        contexts = [row.context() for row in joining]
        distinct = {context.tobytes(): context for context in contexts}
        index = {content: i for i, content in enumerate(distinct)}
        sources = np.array([index[context.tobytes()] for context in contexts])
        lengths = np.array([len(context) for context in contexts])
        tokens = np.zeros((len(distinct), lengths.max()), np.int64)
        for i, context in enumerate(distinct.values()):
            tokens[i, : len(context)] = context
        slots = np.arange(len(self.rows), len(self.rows) + len(joining))
        self._make_room(len(joining))
        self.cache.prefill(slots, sources, lengths)
        last_positions, columns = np.unique(lengths - 1, return_inverse=True)
        logits = self.model.prefill(tokens, last_positions, self.cache)[sources, columns]

        self.rows += joining
        self._lengths[slots] = lengths
        self._set_sampling(slots, joining)
        finished = self._append(slots, logits)
        self.costs.prefilled(sum(map(len, distinct.values())), time.perf_counter() - started)
        return finished

    def _kept_of(self, row: Row) -> tuple[int, int] | None:
        """(slot, tokens): where the KV of this trajectory's earlier turns still lies, beyond its prompt."""
        if self.kept is None or not len(row.request.token_ids):
            return None
        return self.kept.longest(row.context(), len(row.request.prompt_token_ids) + 1)

    def _extend(self, row: Row, source: int, start: int) -> list[Row]:
        """Put a row into the next slot behind what a free slot holds of it, and generate its first token."""
        assert self.kept is not None
        slot, context = len(self.rows), row.context()
        self.kept.bring(source, slot)
        positions, mask = self.cache.extend(slot, start, len(context) - start)
        logits = self.model.extend(context[start:].astype(np.int64), positions, mask, self.cache)
        slots = np.array([slot])
        self.rows.append(row)
        self._lengths[slot] = len(context)
        self._set_sampling(slots, [row])
        return self._append(slots, logits)

    def _make_room(self, count: int) -> None:
        """The next slots are taken."""
        if self.kept is not None:
            self.kept.make_room(len(self.rows), count)

    def _set_sampling(self, slots: NDArray[np.int64], rows: list[Row]) -> None:
        self._temperature[slots] = [row.request.temperature for row in rows]
        self._top_p[slots] = [row.request.top_p for row in rows]
        self._keys[slots] = [token_sampling.key_of(self._seed_of(row.request)) for row in rows]

    def _decode(self) -> list[Row]:
        """One token for every row."""
        count = len(self.rows)
        lengths = self._lengths[:count]
        positions, mask = self.cache.decode(lengths)
        logits = self.model.decode(self._last[:count], positions, mask, self.cache)
        lengths += 1
        return self._append(np.arange(count), logits)

    def _append(self, slots: NDArray[np.int64], logits: torch.Tensor) -> list[Row]:
        """Draw the next token of these slots from logits [n, vocabulary]; returns and removes the rows that end with it."""
        first, end = slots[0], slots[-1] + 1
        uniform = token_sampling.uniforms(self._keys[first:end], self._lengths[first:end])
        drawn = token_sampling.draw(logits, self._temperature[first:end], self._top_p[first:end], uniform)
        tokens, logprobs = drawn[0].tolist(), drawn[1].tolist()
        self._last[first:end] = tokens
        ended = []
        for slot, token, logprob in zip(range(first, end), tokens, logprobs, strict=True):
            row = self.rows[slot]
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.left -= 1
            if token in row.stop_token_ids:
                row.finish_reason = "stop"
            elif row.left == 0:
                row.finish_reason = "length"
            else:
                continue
            ended.append(slot)
        finished = [self.rows[slot] for slot in ended]
        for slot in reversed(ended):  # from the back, so that what moves forward is never one that has ended
            self._remove(slot)
        return finished

    def _remove(self, slot: int) -> None:
        """Free a slot; the last row moves into it, and what was there may stay in the last slot."""
        last = len(self.rows) - 1
        tokens = int(self._lengths[slot])
        if self.kept is not None:
            row = self.rows[slot]
            self.kept.keep(last, np.concatenate([row.context(), np.array(row.token_ids, np.int32)])[:tokens])
        if slot != last:
            if self.kept is None:
                self.cache.move(last, slot, int(self._lengths[last]))
            else:
                self.cache.swap(slot, last, tokens, int(self._lengths[last]))
            self.rows[slot] = self.rows[last]
            for values in (
                self._lengths,
                self._last,
                self._keys,
                self._temperature,
                self._top_p,
            ):
                values[slot] = values[last]
        self.rows.pop()

    def _seed_of(self, request: GenerationRequest) -> int:
        return int(self._random.integers(2**63)) if request.seed is None else request.seed
