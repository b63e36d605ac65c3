from __future__ import annotations

import pytest
import torch

from laminar.weights.sharded_matrix import ShardedMatrix, columns_of_shards

FULL = torch.arange(48.0).view(4, 12)


@pytest.fixture(params=[torch.no_grad, torch.inference_mode, torch.enable_grad])
def matrix(request):
    blocks = columns_of_shards(FULL, 3).contiguous()
    with request.param():
        yield ShardedMatrix(blocks)


@pytest.fixture
def never_put_together(monkeypatch):
    monkeypatch.setattr(ShardedMatrix, "full", lambda matrix: pytest.fail("a full copy was made"))


def test_a_shard_is_a_view(matrix, never_put_together):
    for dim in (1, -1):
        shard = matrix.narrow(dim, 4, 4)
        assert type(shard) is torch.Tensor
        assert shard.is_contiguous()
        assert shard.data_ptr() == matrix.blocks[1].data_ptr()
        assert torch.equal(shard, FULL[:, 4:8])


def test_several_shards_rows_and_all_of_it_are_copied_out_without_a_full_copy(matrix, never_put_together):
    for piece, expected in [
        (matrix, FULL),
        (matrix.narrow(1, 4, 8), FULL[:, 4:]),
        (matrix.narrow(1, 0, 12), FULL),
        (matrix.narrow(0, 1, 2), FULL[1:3]),
        (matrix.narrow(0, 1, 2).narrow(1, 8, 4), FULL[1:3, 8:]),
        (matrix.detach().data, FULL),
    ]:
        assert piece.shape == expected.shape
        for target in (torch.zeros(expected.shape), torch.zeros(expected.T.shape).T):
            assert torch.equal(target.copy_(piece), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda matrix: matrix.narrow(1, 1, 5),
        lambda matrix: matrix.narrow(1, 4, 0),
        lambda matrix: matrix[:, 2:9:2],
        lambda matrix: matrix[1],
        lambda matrix: matrix[-2:, :-4],
        lambda matrix: matrix.t(),
        lambda matrix: matrix.view(6, 8),
        lambda matrix: matrix.flatten(),
        lambda matrix: matrix.view(torch.int32),
        lambda matrix: matrix.to(torch.bfloat16),
        lambda matrix: matrix.clone(),
        lambda matrix: matrix.chunk(2, dim=1)[1],
        lambda matrix: torch.cat([matrix, matrix]),
        lambda matrix: matrix @ matrix.T,
        lambda matrix: torch.zeros(2, 4, 12).copy_(matrix),
    ],
)
def test_everything_else_sees_the_matrix(matrix, function):
    assert torch.equal(function(matrix), function(FULL))


def test_vllm_counts_what_it_loads(matrix):
    meta = pytest.importorskip("vllm.model_executor.model_loader.reload.meta")
    with meta.CopyCounter() as counter:
        torch.empty(4, 12, device="meta").copy_(matrix)
        torch.empty(4, 8, device="meta").copy_(matrix.narrow(1, 4, 8))
    assert counter.copied_numel == 48 + 32
