"""What a person may ask of a live run: pause, resume, stop. One object that the drivers look at.

It holds for the next controller, too, if this one is killed; who resumes a run by hand begins with nothing asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection


class RunControl:
    """Flags with the events that wake whoever waits for them."""

    def __init__(self, asked: Collection[str] = ()) -> None:
        """`asked`: of an earlier controller."""
        self.generation_paused = "pause generation" in asked
        self.training_allowed = asyncio.Event()
        if "pause training" not in asked:
            self.training_allowed.set()
        self.stop_requested = asyncio.Event()
        if "stop" in asked:
            self.stop_requested.set()
        self.on_change: list[Callable[[], None]] = []

    @property
    def asked(self) -> tuple[str, ...]:
        """What has been asked for, and holds."""
        holds = {
            "pause generation": self.generation_paused,
            "pause training": not self.training_allowed.is_set(),
            "stop": self.stop_requested.is_set(),
        }
        return tuple(words for words, held in holds.items() if held)

    def pause(self, *, generation: bool, training: bool) -> None:
        """Stop starting prompts and/or steps; what is running is finished."""
        if generation:
            self.generation_paused = True
        if training:
            self.training_allowed.clear()
        self._changed()

    def resume(self, *, generation: bool, training: bool) -> None:
        """Undo `pause`."""
        if generation:
            self.generation_paused = False
        if training:
            self.training_allowed.set()
        self._changed()

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self.stop_requested.set()
        self._changed()

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()
