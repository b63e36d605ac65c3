from __future__ import annotations

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.simulation.models.lengths import FileLengths, Growth, LogNormalLengths, cut, draw


def test_log_normal_has_its_median_and_99th_percentile():
    lengths = LogNormalLengths(median=1500, p99=12_000, maximum=100_000)
    drawn = draw(lengths, np.random.default_rng(1), 200_000)
    assert np.median(drawn) == pytest.approx(1500, rel=0.02)
    assert np.percentile(drawn, 99) == pytest.approx(12_000, rel=0.03)
    assert drawn.dtype == np.int64 and drawn.min() >= 1


def test_longer_ones_are_cut_at_the_maximum():
    lengths = LogNormalLengths(median=1500, p99=12_000, maximum=8000)
    drawn = draw(lengths, np.random.default_rng(1), 20_000)
    assert drawn.max() == 8000
    assert 0.01 < (drawn == 8000).mean() < 0.1
    assert cut(lengths, np.array([0.2, 7999.6, 9000.0])).tolist() == [1, 8000, 8000]


def test_same_generator_same_lengths():
    lengths = LogNormalLengths(median=1500, p99=12_000, maximum=8000)
    first, second = (draw(lengths, np.random.default_rng(7), 100) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("text", ["10\n20\n\n30\n40\n", "[10, 20, 30, 40]", "40\n30.0\n2e1\n10"])
def test_a_file_of_lengths(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    drawn = draw(FileLengths(path), np.random.default_rng(2), 40_000)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [10, 20, 30, 40]
    assert counts == pytest.approx([10_000] * 4, rel=0.05)
    assert draw(FileLengths(path, maximum=25), np.random.default_rng(2), 1000).max() == 25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected one length a line"),
        ("\n \n", "is empty"),
        ("[]", "is empty"),
        ("5\n-3\n", "line 2: '-3'; expected a whole number of tokens, 1 at least"),
        ("5\n0\n", "line 2: '0'"),
        ("5\n\nmany\n", "line 3: 'many'"),
        ("5\n2.5\n", "line 2: '2.5'"),
        ("NaN", "line 1: 'nan'"),
        ("true", "line 1: 'True'"),
        ("[3, null]", "entry 2: 'None'"),
        ("[3, ", "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_naming_the_line(tmp_path, text, message):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        FileLengths(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="none.txt cannot be read"):
        FileLengths(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"median": 0, "p99": 10, "maximum": 10}, "lengths.median: 0"),
        ({"median": float("nan"), "p99": 10, "maximum": 10}, "lengths.median: nan"),
        ({"median": 20, "p99": 10, "maximum": 10}, "lengths.p99: 10; expected at least lengths.median"),
        ({"median": 5, "p99": 10, "maximum": 0}, "lengths.maximum: 0"),
    ],
)
def test_impossible_percentiles_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        LogNormalLengths(**values)


def test_growth():
    steps = np.array([0, 1, 10])
    assert Growth(per_step=0.1).factor(steps) == pytest.approx([1, 1.1, 2])
    assert Growth(per_step=0.1, kind="geometric").factor(steps) == pytest.approx([1, 1.1, 1.1**10])
    assert Growth().factor(steps).tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="growth_per_step: -0.1"):
        Growth(per_step=-0.1)
    with pytest.raises(UserError, match="growth: 'cubic'"):
        Growth(kind="cubic")
