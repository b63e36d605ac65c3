from __future__ import annotations

import pytest
import torch

from laminar.weights.store import WeightStore
from laminar.weights.tensors import TORCH_DTYPES, layout_of, read_tensors, tied_names, write_tensors


@pytest.fixture
def store(shared_memory):
    return WeightStore("run", "relay-0", shared_memory)


def publish(store, version, state_dict, dtype=None, shards=None):
    writer = store.begin(version, layout_of(state_dict, dtype, shards))
    write_tensors(writer, state_dict.items())
    return writer.commit()


def random_tensor(dtype):
    values = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 5), generator=torch.Generator().manual_seed(0))
    return values.to(dtype)


def test_every_dtype_comes_back_bit_exact(store):
    state_dict = {name: random_tensor(dtype) for name, dtype in TORCH_DTYPES.items()}
    state_dict["scalar"] = torch.tensor(2.5)
    state_dict["empty"] = torch.empty(0, 4)
    read = dict(read_tensors(publish(store, 0, state_dict)))
    assert list(read) == list(state_dict)
    for name, tensor in state_dict.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def test_nan_payloads_and_negative_zero_survive(store):
    bits = torch.tensor([0x7FC1, 0xFFA5 - 0x10000, -0x8000, 0x0001], dtype=torch.int16)
    read = dict(read_tensors(publish(store, 0, {"w": bits.view(torch.bfloat16)})))
    assert torch.equal(read["w"].view(torch.int16), bits)


def test_tensors_that_are_not_contiguous_are_stored_in_row_major_order(store):
    base = torch.arange(12.0).view(3, 4)
    read = dict(read_tensors(publish(store, 0, {"transposed": base.T, "columns": base[:, 1:3]})))
    assert torch.equal(read["transposed"], base.T)
    assert read["transposed"].is_contiguous()
    assert torch.equal(read["columns"], base[:, 1:3])


def test_reading_copies_nothing_and_outlives_the_file(store):
    read = dict(read_tensors(publish(store, 0, {"a": torch.ones(64), "b": torch.full((64,), 2.0)})))
    assert read["a"].untyped_storage().data_ptr() == read["b"].untyped_storage().data_ptr()
    store.remove()
    assert torch.equal(read["b"], torch.full((64,), 2.0))


def test_writing_into_a_view_does_not_change_the_version(store):
    path = publish(store, 0, {"a": torch.ones(4)})
    dict(read_tensors(path))["a"].zero_()
    assert torch.equal(dict(read_tensors(path))["a"], torch.ones(4))


def test_tied_weights_are_stored_once(store):
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    state_dict = torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head}).state_dict()
    assert tied_names(state_dict) == {"lm_head.weight": "embed_tokens.weight"}
    assert [entry.name for entry in layout_of(state_dict).entries] == ["embed_tokens.weight"]
    assert list(dict(read_tensors(publish(store, 0, state_dict)))) == ["embed_tokens.weight"]


def test_slices_of_one_storage_are_not_tied():
    flat = torch.arange(8.0)
    assert tied_names({"a": flat[:4], "b": flat[4:], "c": flat[:4].view(2, 2)}) == {}


def test_floating_point_tensors_are_cast_and_others_are_not(store):
    state_dict = {"w": torch.tensor([1.0, 1.00390625, 3e38]), "ids": torch.tensor([1, 2])}
    read = dict(read_tensors(publish(store, 0, state_dict, torch.bfloat16)))
    assert torch.equal(read["w"], state_dict["w"].to(torch.bfloat16))
    assert torch.equal(read["ids"], state_dict["ids"])


def test_gradients_do_not_get_in_the_way(store):
    parameter = torch.nn.Parameter(torch.ones(3))
    assert torch.equal(dict(read_tensors(publish(store, 0, {"w": parameter})))["w"], torch.ones(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": torch.ones(3)}, "1 tensors that were not given, first 'b'"),
        ({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, "'c' was given twice or is not in"),
        ({"a": torch.ones(4), "b": torch.ones(3)}, r"'a' has shape \(4,\)"),
        ({"a": torch.ones(3, dtype=torch.int32), "b": torch.ones(3)}, "'a' has dtype torch.int32"),
    ],
)
def test_what_does_not_match_the_layout_is_named(store, given, message):
    writer = store.begin(0, layout_of({"a": torch.ones(3), "b": torch.ones(3)}))
    with pytest.raises(ValueError, match=message):
        write_tensors(writer, given.items())


def test_a_tensor_given_twice_is_noticed(store):
    writer = store.begin(0, layout_of({"a": torch.ones(3)}))
    with pytest.raises(ValueError, match="'a' was given twice"):
        write_tensors(writer, [("a", torch.ones(3)), ("a", torch.zeros(3))])


def test_a_strange_tensor_in_freed_memory_is_not_taken_for_a_tied_one(store):
    writer = store.begin(0, layout_of({"a": torch.ones(3)}))
    with pytest.raises(ValueError, match="'b' was given twice or is not in"):
        write_tensors(writer, ((name, torch.ones(3)) for name in "ab"))


def test_unknown_dtypes_are_named():
    with pytest.raises(ValueError, match="'w': dtype torch.complex64"):
        layout_of({"w": torch.ones(2, dtype=torch.complex64)})


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_sharded_tensor_is_written_and_read_as_the_matrix_that_it_is(store, degree):
    state_dict = {"w": torch.randn(5, 16), "transposed": torch.randn(16, 5).T, "plain": torch.randn(3, 4)}
    shards = {"w": 4, "transposed": 4}
    read = dict(read_tensors(publish(store, 0, state_dict, torch.bfloat16, shards)))
    for name, tensor in state_dict.items():
        assert torch.equal(read[name], tensor.bfloat16()), name
        assert read[name].shape == tensor.shape
        loaded = torch.empty(tensor.shape, dtype=torch.bfloat16)
        loaded.copy_(read[name])
        assert torch.equal(loaded, tensor.bfloat16())
    for rank in range(degree):
        size = 16 // degree
        shard = torch.empty(5, size, dtype=torch.bfloat16)
        shard.copy_(read["w"].narrow(1, rank * size, size))
        assert torch.equal(shard, state_dict["w"].bfloat16()[:, rank * size : (rank + 1) * size])


def test_a_shard_is_contiguous_memory_of_the_file(store):
    state_dict = {"w": torch.randn(5, 16), "b": torch.randn(3)}
    read = dict(read_tensors(publish(store, 0, state_dict, shards={"w": 4})))
    buffer = read["b"].untyped_storage()
    shards = [read["w"].narrow(1, 4 * rank, 4) for rank in range(4)]
    assert all(shard.is_contiguous() and shard.untyped_storage().data_ptr() == buffer.data_ptr() for shard in shards)
    assert [shard.data_ptr() - shards[0].data_ptr() for shard in shards] == [0, 80, 160, 240]
