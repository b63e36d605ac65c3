from __future__ import annotations

import pytest
import torch

from laminar.workers.trainer.staging import BUFFERS, Staging


class Event:
    def __init__(self, lane, buffer, piece):
        self.lane, self.buffer, self.piece = lane, buffer, piece

    def synchronize(self):
        """The copy happens as late as it may."""
        self.buffer.copy_(self.piece)
        self.lane.under_way.remove(self)


class LateLane:
    """A lane whose copies have happened only when somebody has waited for them."""

    def __init__(self):
        self.under_way = []
        self.most = 0
        self.allocated = []

    def buffer(self, nbytes):
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def fill(self, buffer, piece):
        assert buffer.shape == piece.shape
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        for other in self.under_way:
            assert other.buffer.data_ptr() >= stop or other.buffer.data_ptr() + other.buffer.nbytes <= start
        event = Event(self, buffer, piece)
        self.under_way.append(event)
        self.most = max(self.most, len(self.under_way))
        return event


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nbytes", [64, 256, 1 << 20])
def test_tensors_of_any_shape_arrive(dtype, nbytes):
    lane = LateLane()
    staging = Staging(lane, nbytes)
    sources = [torch.randn(shape) for shape in [(), (1,), (300,), (7, 9), (9, 33), (3, 5, 40), (2, 400)]]
    sources.append(torch.randn(30, 20).T.unflatten(1, (2, 15)).permute(1, 0, 2))
    targets = [torch.zeros(source.shape, dtype=dtype) for source in sources]
    for target, source in zip(targets, sources, strict=True):
        staging.copy(target, source)
    staging.finish()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(dtype))
    assert lane.allocated == [nbytes] * BUFFERS
    assert lane.most == BUFFERS
    assert lane.under_way == []


def test_the_next_tensor_is_gathered_while_the_last_pieces_are_under_way():
    lane = LateLane()
    staging = Staging(lane, 64)
    staging.copy(torch.zeros(64), torch.ones(64))
    assert len(lane.under_way) == BUFFERS
    staging.abandon()
    assert lane.under_way == []


def test_an_abandoned_copy_leaves_the_file_alone():
    staging = Staging(LateLane(), 64)
    target = torch.zeros(16)
    staging.copy(target, torch.ones(16))
    staging.abandon()
    staging.finish()
    assert torch.equal(target, torch.zeros(16))
