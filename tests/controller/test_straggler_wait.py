import pytest

from laminar.controller.straggler_wait import StragglerWait


def test_a_wait_counts_from_when_a_steps_groups_are_ready_and_the_trainer_is_free():
    wait = StragglerWait(groups_per_step=4, now=0.0)
    assert wait.share == 0.0
    wait.ready(3, 1.0)
    wait.ready(4, 6.0)
    wait.ready(5, 7.0)
    wait.step_started(1, 10.0)  # it waited for groups until 6, for stragglers until 10
    assert wait.share == pytest.approx(0.4)
    wait.ready(4, 12.0)  # while it trains
    wait.step_finished(15.0)
    wait.step_started(4, 18.0)
    assert wait.share == pytest.approx((4 + 3) / 18)


def test_a_trainer_that_waits_for_groups_waits_for_no_straggler():
    wait = StragglerWait(groups_per_step=2, now=0.0)
    for step in range(5):
        wait.ready(2, 10.0 * step + 9)
        wait.step_started(0, 10.0 * step + 9)
        wait.step_finished(10.0 * step + 10)
    assert wait.share == 0.0


def test_old_steps_are_forgotten():
    wait = StragglerWait(groups_per_step=1, now=0.0)
    wait.ready(1, 0.0)
    wait.step_started(0, 100.0)
    for step in range(3):
        wait.step_started(0, 101.0 + step)
    assert wait.share == 0.0
