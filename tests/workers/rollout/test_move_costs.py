"""Measured costs of prefills and moves."""

import pytest

from laminar.workers.rollout.move_costs import MoveCosts


def test_nothing_measured_is_zero():
    costs = MoveCosts()
    assert (costs.prefill_s_per_token, costs.kv_move_s_per_token) == (0.0, 0.0)


def test_an_end_that_was_not_seen_counts_as_much_as_the_other():
    costs = MoveCosts()
    costs.exported(100, 0.2)
    assert costs.kv_move_s_per_token == pytest.approx(0.004)
    costs.imported(100, 0.1)
    assert costs.kv_move_s_per_token == pytest.approx(0.003)


def test_short_prefills_say_nothing_and_old_ones_are_forgotten():
    costs = MoveCosts()
    costs.prefilled(1, 5.0)
    assert costs.prefill_s_per_token == 0.0
    costs.prefilled(1000, 10.0)
    for _ in range(40):
        costs.prefilled(1000, 1.0)
    assert costs.prefill_s_per_token == pytest.approx(0.001, rel=0.02)
