from __future__ import annotations

import pytest

from laminar.weights.layout import ALIGNMENT, TensorEntry, WeightLayout, chunk_spans


def planned() -> WeightLayout:
    return WeightLayout.plan(
        [("a", "float32", (3, 5)), ("scalar", "int64", ()), ("none", "float32", (0, 4)), ("b", "bfloat16", (7,))]
    )


def test_plan_aligns_every_tensor_and_counts_its_bytes():
    layout = planned()
    assert [(e.name, e.offset, e.nbytes) for e in layout.entries] == [
        ("a", 0, 60),
        ("scalar", 64, 8),
        ("none", 128, 0),
        ("b", 128, 14),
    ]
    assert layout.total_bytes == 192
    assert layout.total_bytes % ALIGNMENT == 0


def test_layout_survives_bytes():
    sharded = WeightLayout.plan([("a", "int8", (2, 6)), ("b", "int8", (2, 6))], {"b": 3})
    assert [entry.shards for entry in WeightLayout.from_bytes(sharded.to_bytes()).entries] == [1, 3]
    assert WeightLayout.from_bytes(planned().to_bytes()) == planned()
    assert WeightLayout.from_bytes(WeightLayout.plan([]).to_bytes()) == WeightLayout(entries=(), total_bytes=0)


@pytest.mark.parametrize(
    ("rows", "total", "message"),
    [
        ([["x", "float31", [2], 0, 8, 1]], 64, "'x' has dtype 'float31'"),
        ([["x", "float32", [-2], 0, -8, 1]], 64, "'x' has shape .*negative"),
        ([["x", "float32", [2], -64, 8, 1]], 64, "'x'.* -64.*negative"),
        ([["x", "float32", [2], 8, 8, 1]], 64, "'x' at offset 8"),
        ([["x", "float32", [2], 0, 4, 1]], 64, "'x' .* says 4 bytes; expected 8"),
        ([["x", "float32", [20], 0, 80, 1]], 64, "'x' ends at byte 80, beyond the end"),
        ([["x", "float32", [20], 0, 80, 1], ["y", "int8", [3], 64, 3, 1]], 128, "'y' overlaps tensor 'x'"),
        ([["y", "int8", [3], 64, 3, 1], ["x", "float32", [20], 0, 80, 1]], 128, "'y' overlaps tensor 'x'"),
        ([["x", "int8", [3], 0, 3, 1], ["x", "int8", [3], 64, 3, 1]], 128, "'x' appears twice"),
        ([["x", "int8", ["3"], 0, 3, 1]], 64, "'x' has shape"),
        ([["x", "int8", [3], 0, 3]], 64, "entry 0"),
        ([["x", "int8", [2, 6], 0, 12, 4]], 64, r"'x' of shape \(2, 6\) is cut into 4 shards"),
        ([["x", "int8", [6], 0, 6, 2]], 64, "'x' .* 2 shards; expected a matrix"),
        ([["x", "int8", [2, 6], 0, 12, 0]], 64, "'x' .* 0 shards"),
        ([["x", "int8", [2, 6], 0, 12, -2]], 64, "'x' .* -2 shards"),
        ([[5, "int8", [3], 0, 3, 1]], 64, "entry 0"),
        ("x", 64, "entries a list"),
        ([], -1, "-1 bytes"),
        ([], "1", "integer"),
    ],
)
def test_layout_from_a_peer_is_checked(rows, total, message):
    with pytest.raises(ValueError, match=message):
        WeightLayout.from_dict({"total_bytes": total, "entries": rows})


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x93abc", b"\xa2\xff\xff"])
def test_garbage_is_a_value_error(data):
    with pytest.raises(ValueError, match="weight layout"):
        WeightLayout.from_bytes(data)


def test_plan_refuses_what_cannot_be_stored():
    with pytest.raises(ValueError, match="'w' has dtype 'complex64'"):
        WeightLayout.plan([("w", "complex64", (2,))])
    with pytest.raises(ValueError, match="twice"):
        WeightLayout.plan([("w", "int8", (2,)), ("w", "int8", (2,))])


def test_an_entry_cannot_be_constructed_around_the_check():
    with pytest.raises(ValueError, match="beyond the end"):
        WeightLayout(entries=(TensorEntry(name="w", dtype="int8", shape=(9,), offset=0, nbytes=9),), total_bytes=8)


@pytest.mark.parametrize(
    ("total", "chunk", "spans"),
    [(10, 4, [(0, 4), (4, 8), (8, 10)]), (8, 4, [(0, 4), (4, 8)]), (3, 4, [(0, 3)]), (0, 4, [])],
)
def test_chunks_cover_everything_once(total, chunk, spans):
    assert chunk_spans(total, chunk) == spans


def test_chunks_have_a_size():
    with pytest.raises(ValueError, match="chunks of 0 bytes"):
        chunk_spans(10, 0)


def test_shards_of_a_tensor_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="'w' of shape \\(2, 6\\) is cut into 4 shards"):
        WeightLayout.plan([("w", "int8", (2, 6))], {"w": 4})


def test_a_layout_that_is_not_the_models_says_what_differs():
    layout = WeightLayout.plan([("a", "float32", (2, 6)), ("b", "int8", (3,)), ("x", "int8", (1,))], {"a": 2})
    assert layout.mismatch({"a": ("float32", (2, 6)), "b": ("int8", (3,)), "x": ("int8", (1,))}) is None
    mismatch = layout.mismatch({"a": ("bfloat16", (2, 6)), "b": ("int8", (4,)), "c": ("int8", (1,))})
    assert mismatch is not None
    assert "1 missing (c)" in mismatch
    assert "1 not of the model (x)" in mismatch
    assert "a is float32 [2, 6], the model has bfloat16 [2, 6]; b is int8 [3], the model has int8 [4]" in mismatch
