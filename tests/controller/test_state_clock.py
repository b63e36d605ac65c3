"""Seconds per state."""

from laminar.controller.state_clock import StateClock, difference


def test_adds_up_the_time_in_each_state():
    now = [10.0]
    clock = StateClock("starting", lambda: now[0])
    now[0] = 12.0
    clock.enter("training")
    now[0] = 15.0
    clock.enter("waiting")
    now[0] = 16.0
    before = clock.totals()
    assert before == {"starting": 2.0, "training": 3.0, "waiting": 1.0}
    clock.enter("training")
    now[0] = 20.0
    after = clock.totals()
    assert difference(after, before) == {"starting": 0.0, "training": 4.0, "waiting": 0.0}
    assert sum(after.values()) == 10.0
