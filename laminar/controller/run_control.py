"""What a person may ask of a live run: pause, resume, stop. One object that the drivers look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class RunControl:
    """Flags with the events that wake whoever waits for them."""

    def __init__(self) -> None:
        self.generation_paused = False
        self.training_allowed = asyncio.Event()
        self.training_allowed.set()
        self.stop_requested = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []

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
