from __future__ import annotations

from laminar.observability.step_table import StepTable
from tests.run_parts import a_metrics_line


def test_cells_stand_below_their_titles():
    table = StepTable(steps=120, width=None)
    header, row = table.header(), table.row(a_metrics_line(7))
    assert len(header) == len(row)
    assert row.split() == ["7/120", "1.7500", "0.50/1", "12.3k", "20.0k", "42%", "3", "1.50e-04", "1.00e-04", "2.00"]
    end = header.index("reward") + len("reward")
    assert row[end - 6 : end] == "1.7500"


def test_missing_figures_are_dashes():
    row = StepTable(steps=9, width=None).row({"step": 1, "mismatch_kl": None})
    assert row.split() == ["1/9", "-", "-/-", "-", "-", "-", "-", "-", "-", "-"]


def test_a_narrow_terminal_loses_the_least_important_columns():
    for width in (20, 40, 60, 80, 100):
        table = StepTable(steps=1000, width=width)
        assert len(table.header()) <= width
        assert [column.title for column in table.columns][:2] == ["step", "reward"]
    assert len(StepTable(steps=1000, width=5).columns) == 1
