"""How generation and training are interleaved: pure policies behind `Schedule`; coroutines elsewhere drive them.

`make_schedule.py` makes the one that the config names. `docs/schedules.md` says what waits for what under each, and
proves that `schedule.max_staleness` holds.
"""
