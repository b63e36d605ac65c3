"""Prompts that wait to be generated, fetched ahead of need.

Invariants: every position of the data order is used once, in order; a prompt that cannot be used (it does not fit, its row is
at fault, the environment cannot begin with it) is counted and named, never retried; after the end of the data `exhausted`
stays true.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from laminar.controller.journal.restore import Restored
from laminar.errors import RunFailed, UserError
from laminar.observability.events import EventBus, PromptRejected
from laminar.protocol.messages import PromptRecord, PromptsFetched
from laminar.trajectory import Prompt

FAILURES = 8  # prompts in a row that cannot be used: it is not single rows that are at fault

Fetch = Callable[[int, int], Awaitable[PromptsFetched]]


class PromptPool:
    """Keeps at least `low_water` prompts at hand while the data lasts."""

    def __init__(
        self,
        fetch: Fetch,
        events: EventBus,
        *,
        max_prompt_tokens: int,
        low_water: int,
        restored: Restored | None = None,
    ) -> None:
        """`restored`: how far an earlier controller of this run has come; what it had fetched is fetched again."""
        self.cursor = 0 if restored is None else restored.cursor  # next position to fetch
        self._rejected_before = {} if restored is None else restored.rejected  # these have been told of
        self.rejected = sum(prompt_id < self.cursor for prompt_id in self._rejected_before)
        self.exhausted = False
        self._failed_in_a_row = 0
        self._last_failure = ""
        self._fetch = fetch
        self._events = events
        self._max_prompt_tokens = max_prompt_tokens
        self._low_water = low_water
        self._prompts: deque[Prompt] = deque(() if restored is None else restored.again.values())
        self._taken = asyncio.Event()
        self._taken.set()
        self.on_filled: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def ended(self) -> bool:
        """The data has ended and every prompt has been taken."""
        return self.exhausted and not self._prompts

    def take(self) -> Prompt | None:
        """The next prompt, or None if none is at hand just now."""
        if not self._prompts:
            return None
        self._taken.set()
        return self._prompts.popleft()

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Nothing is left of the groups that they were drawn for: they are the next to be drawn."""
        self._prompts.extendleft(reversed(list(prompts)))
        self.on_filled()

    async def fill_forever(self) -> None:
        """Fetch whenever fewer than `low_water` prompts are left, until the data ends.

        Consumes prompts of the environment workers, waits for `take`, unblocks the rollout drivers by `on_filled`.

        Raises:
            RunFailed: none of the last prompts could be used.
            UserError: not one prompt of the data is short enough.
        """
        while not self.exhausted:
            await self._taken.wait()
            self._taken.clear()
            while len(self._prompts) < self._low_water and not self.exhausted:
                answer = await self._fetch(self.cursor, self._low_water)
                self._take_in(answer)
        if self._failed_in_a_row and self.rejected == self.cursor:
            raise RunFailed(f"none of the {self.rejected} prompts can be used: {self._last_failure}")
        if self.rejected and self.rejected == self.cursor:
            raise UserError(
                f"data.max_prompt_tokens: all {self.rejected} prompts are longer than {self._max_prompt_tokens} tokens; "
                "raise it, or check data.prompt_template"
            )

    def _take_in(self, answer: PromptsFetched) -> None:
        self.cursor = answer.start + len(answer.prompts)
        self.exhausted = answer.exhausted
        for record in answer.prompts:
            length = int(record.token_ids.shape[0])
            self._note_failure(record)
            if not record.error and 0 < length <= self._max_prompt_tokens:
                self._prompts.append(prompt_of(record))
                continue
            self.rejected += 1
            if record.prompt_id in self._rejected_before:
                continue
            reason = f"{length} tokens, data.max_prompt_tokens is {self._max_prompt_tokens}" if length else "no tokens"
            rejected = PromptRejected(prompt_id=record.prompt_id, source=record.source, reason=record.error or reason)
            self._events.emit(rejected)
        self.on_filled()

    def _note_failure(self, record: PromptRecord) -> None:
        if not record.error:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        self._last_failure = f"prompt {record.prompt_id}: {record.error}"
        if self._failed_in_a_row == FAILURES:
            raise RunFailed(f"{self._last_failure}. So it was with {FAILURES} prompts in a row")


def prompt_of(record: PromptRecord) -> Prompt:
    """What an environment worker has sent, as the controller keeps it."""
    return Prompt(
        prompt_id=record.prompt_id,
        source=record.source,
        text=record.text,
        token_ids=record.token_ids,
        answer=record.answer,
        metadata=record.metadata,
    )
