from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.weights import delta
from laminar.weights.delta import MAX_CHANGED_SHARE, apply_chunk, element_widths, encode_chunk
from laminar.weights.layout import WeightLayout, chunk_spans

WIDTHS = (1, 2, 4, 8)
HEADER = struct.Struct("<BBBBQIII")


def bf16(values):
    """float32 [N] rounded to nearest even, as the bytes of bfloat16."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)


def weights(count, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, count).astype(np.float32)


def stepped(chunk, share, seed=1):
    """The chunk with that share of its bf16 elements one step further, up or down."""
    rng = np.random.default_rng(seed)
    elements = chunk.copy().view(np.uint16)
    chosen = rng.random(len(elements)) < share
    elements[chosen] += np.where(rng.random(int(chosen.sum())) < 0.5, 1, 0xFFFF).astype(np.uint16)
    return elements.view(np.uint8)


def applied(payload, base):
    out = np.full(len(base), 0xA5, np.uint8)
    apply_chunk(payload, base, out)
    return out


@st.composite
def two_versions(draw):
    """(new, base): few and many changes, short and long runs, any bytes, sizes that no width divides."""
    size = draw(st.integers(0, 3000) | st.integers(150_000, 700_000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.integers(0, 256, size, np.uint8)
    new = base.copy()
    count = int(size * draw(st.sampled_from([0, 0.00002, 0.001, 0.01, 0.05, 0.5])))
    places = rng.integers(0, max(size, 1), count)
    match draw(st.sampled_from(["steps", "bytes", "run"])):
        case "steps":
            new[places] += rng.integers(0, 5, count, np.uint8) - np.uint8(2)
        case "bytes":
            new[places] = rng.integers(0, 256, count, np.uint8)
        case "run":
            start = draw(st.integers(0, size))
            new[start : start + count] = 0
    return new, base


@settings(max_examples=150)
@given(two_versions(), st.sampled_from(WIDTHS))
def test_any_bytes_come_back_exactly_and_in_fewer_bytes_than_the_full_chunk(versions, element_bytes):
    new, base = versions
    payload = encode_chunk(new, base, element_bytes)
    if payload is None:
        return
    assert len(payload) < len(new)
    assert np.array_equal(applied(payload, base), new)


@pytest.mark.parametrize("element_bytes", WIDTHS)
@pytest.mark.parametrize("size", [256, 1000, 65_537, 300_007])
def test_few_changes_are_encoded_at_every_width_and_size(element_bytes, size):
    base = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    new = base.copy()
    new[[0, size // 2, size - 1]] ^= 0x81
    payload = encode_chunk(new, base, element_bytes)
    assert payload is not None
    assert np.array_equal(applied(payload, base), new)


@pytest.mark.parametrize("element_bytes", WIDTHS)
def test_an_unchanged_chunk_takes_a_header(element_bytes):
    base = weights(100_000).view(np.uint8)
    payload = encode_chunk(base.copy(), base, element_bytes)
    assert len(payload) == HEADER.size
    assert np.array_equal(applied(payload, base), base)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_chunk_too_small_for_a_header_goes_in_full(size):
    base = np.zeros(size, np.uint8)
    assert encode_chunk(base.copy(), base) is None


def test_too_many_changes_are_given_up_before_the_chunk_was_read(monkeypatch):
    base = bf16(weights(1 << 21))
    new = base + np.uint8(1)
    compared = []
    real = np.flatnonzero

    def counting(array):
        compared.append(array.size)
        return real(array)

    monkeypatch.setattr(delta.np, "flatnonzero", counting)
    assert encode_chunk(new, base) is None
    assert sum(compared) * 8 < 0.5 * len(base)


def test_more_changed_elements_than_the_limit_go_in_full():
    base = bf16(weights(1 << 18))
    below, above = stepped(base, 0.9 * MAX_CHANGED_SHARE), stepped(base, 1.1 * MAX_CHANGED_SHARE)
    assert np.array_equal(applied(encode_chunk(below, base), base), below)
    assert encode_chunk(above, base) is None


@pytest.mark.parametrize("share, least_ratio", [(0.0001, 4000), (0.001, 500), (0.01, 120), (0.04, 30)])
def test_steps_of_one_take_few_bytes(share, least_ratio):
    base = bf16(weights(1 << 20))
    new = stepped(base, share)
    payload = encode_chunk(new, base)
    assert np.array_equal(applied(payload, base), new)
    assert len(base) / len(payload) > least_ratio


def test_special_values_and_signs_survive():
    special = np.array(
        [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80, 0xBF80], np.uint16
    )
    base_elements = np.zeros(4096, np.uint16)
    new_elements = base_elements.copy()
    pairs = np.array([(a, b) for a in special for b in special], np.uint16)
    base_elements[: len(pairs)], new_elements[: len(pairs)] = pairs.T
    base, new = base_elements.view(np.uint8), new_elements.view(np.uint8)
    payload = encode_chunk(new, base)
    assert np.array_equal(applied(payload, base), new)


def test_thirty_deltas_in_a_row_stay_exact_and_in_place():
    rng = np.random.default_rng(3)
    master = weights(200_003) * 0.1
    version = bf16(master)
    held = version.copy()
    for _ in range(30):
        master += np.float32(1e-6) * rng.choice(np.array([-1, 1], np.float32), len(master))
        newer = bf16(master)
        payload = encode_chunk(newer, version)
        assert payload is not None
        apply_chunk(payload, held, held)
        assert np.array_equal(held, newer)
        version = newer


def test_float32_between_bf16_is_exact():
    base = np.concatenate([bf16(weights(10_000)), weights(1_000, 2).view(np.uint8), bf16(weights(5_001, 3))])
    new = base.copy()
    new[20_000:24_000].view(np.float32)[::7] *= np.float32(1.00001)
    for element_bytes in WIDTHS:
        payload = encode_chunk(new, base, element_bytes)
        assert np.array_equal(applied(payload, base), new)


def test_payloads_and_chunks_may_lie_at_odd_addresses():
    size = 50_001
    base = np.random.default_rng(0).integers(0, 256, size + 1, np.uint8)[1:]
    new = base.copy()
    new[::500] += 1
    payload = encode_chunk(new, base)
    shifted = np.empty(len(payload) + 1, np.uint8)[1:]
    shifted[:] = payload
    out = np.empty(size + 1, np.uint8)[1:]
    apply_chunk(shifted, base, out)
    assert np.array_equal(out, new)


def a_payload(step_bits):
    base = bf16(weights(20_000))
    new = stepped(base, 0.01)
    elements = new.view(np.uint16)
    if step_bits == 8:
        elements[::100] += 100
    elif step_bits == 0:
        elements[::20] ^= 0x4000
    elements[17] ^= 0x8000  # fits in no step
    payload = encode_chunk(new, base)
    assert HEADER.unpack(payload[: HEADER.size].tobytes())[3] == step_bits
    return payload, base


@pytest.mark.parametrize("step_bits", [0, 4, 8])
@pytest.mark.parametrize("field", range(8))
def test_a_header_that_lies_is_refused_and_writes_nothing(step_bits, field):
    payload, base = a_payload(step_bits)
    fields = list(HEADER.unpack(payload[: HEADER.size].tobytes()))
    for wrong in {0, 1, fields[field] + 1, 3, 200, fields[field] * 2} - {fields[field]}:
        changed = [*fields[:field], wrong, *fields[field + 1 :]]
        forged = np.concatenate([np.frombuffer(HEADER.pack(*changed), np.uint8), payload[HEADER.size :]])
        out = np.full(len(base), 7, np.uint8)
        with pytest.raises(ValueError, match="delta: "):
            apply_chunk(forged, base, out)
        assert (out == 7).all()


@settings(max_examples=200)
@given(st.sampled_from([0, 4, 8]), st.data())
def test_a_damaged_payload_is_refused_or_patches_only_out(step_bits, data):
    payload, base = a_payload(step_bits)
    forged = payload.copy()
    for _ in range(data.draw(st.integers(1, 5))):
        forged[data.draw(st.integers(0, len(forged) - 1) | st.integers(0, 40))] = data.draw(st.integers(0, 255))
    forged = forged[: data.draw(st.just(len(forged)) | st.integers(0, len(forged)))]
    around = np.full(len(base) + 128, 7, np.uint8)
    kept = base.copy()
    try:
        apply_chunk(forged, base, around[64:-64])
    except ValueError:
        assert (around == 7).all()
    assert (around[:64] == 7).all() and (around[-64:] == 7).all()
    assert np.array_equal(base, kept)


@pytest.mark.parametrize("nonsense", [b"", b"\0" * 24, b"\xff" * 24, b"\xff" * 5000, bytes(range(256)) * 8])
def test_nonsense_is_refused(nonsense):
    base = np.zeros(1000, np.uint8)
    with pytest.raises(ValueError, match="delta: "):
        apply_chunk(np.frombuffer(nonsense, np.uint8), base, np.empty(1000, np.uint8))


def test_a_payload_for_a_chunk_of_another_size_is_refused():
    payload, base = a_payload(4)
    with pytest.raises(ValueError, match="a payload for a chunk of 40000 bytes, but the base has 39992 bytes"):
        apply_chunk(payload, base[:-8], np.empty(len(base) - 8, np.uint8))


def test_a_change_beyond_the_end_is_refused():
    payload, base = a_payload(4)
    fields = list(HEADER.unpack(payload[: HEADER.size].tobytes()))
    gaps = payload[HEADER.size :][: fields[6]]
    gaps[-1] = 254  # all gaps that are none become as long as they can
    gaps[gaps != 255] = 254
    with pytest.raises(ValueError, match=r"delta: element \d+ changed in a chunk of 20000 elements"):
        apply_chunk(payload, base, np.empty_like(base))


@pytest.mark.parametrize(
    "new, base, element_bytes, message",
    [
        (np.zeros(8, np.uint8), np.zeros(9, np.uint8), 2, "a chunk of 8 bytes against a base of 9 bytes"),
        (np.zeros(8, np.uint16), np.zeros(8, np.uint16), 2, "expected contiguous uint8"),
        (np.zeros(16, np.uint8)[::2], np.zeros(8, np.uint8), 2, "expected contiguous uint8"),
        (np.zeros(9, np.uint8), np.zeros(9, np.uint8), 3, "elements of 3 bytes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(new, base, element_bytes, message):
    with pytest.raises(ValueError, match=message):
        encode_chunk(new, base, element_bytes)


def test_the_width_of_a_chunk_is_that_of_most_of_its_bytes():
    layout = WeightLayout.plan(
        [("a", "bfloat16", (1024,)), ("b", "float32", (2048,)), ("c", "float8_e5m2", (4096,)), ("d", "bfloat16", (0,))]
    )
    assert element_widths(layout, chunk_spans(layout.total_bytes, 2048)) == [2, 4, 4, 4, 4, 1, 1]
    assert element_widths(layout, [(0, 8192)]) == [4]
    assert element_widths(layout, [(1 << 20, 1 << 21)]) == [2]
