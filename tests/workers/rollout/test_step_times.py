import numpy as np
import pytest

from laminar.protocol.codec import Codec
from laminar.protocol.messages import RolloutLoad
from laminar.workers.rollout.step_times import KEPT, StepTimes


def test_the_median_of_each_batch_size_since_the_last_call():
    times = StepTimes()
    for seconds in (0.1, 0.2, 9.0):
        times.add(4, seconds, seconds / 10)
    times.add(1, 0.05, 0.01)
    taken = times.take()
    assert taken.running.tolist() == [1, 4]
    assert taken.seconds.tolist() == pytest.approx([0.05, 0.2])
    assert taken.kv_utilization.tolist() == pytest.approx([0.01, 0.31])
    assert len(times.take().running) == 0


def test_of_many_steps_the_newest_count():
    times = StepTimes()
    for _ in range(KEPT):
        times.add(2, 1.0, 0.5)
    for _ in range(KEPT):
        times.add(2, 3.0, 0.5)
    assert times.take().seconds.tolist() == [3.0]


@pytest.mark.parametrize("filled", [False, True])
def test_it_crosses_the_wire(filled):
    times = StepTimes()
    if filled:
        times.add(2, 0.25, 0.5)
    sent = RolloutLoad(running=1, waiting=0, kv_utilization=0.5, steps=times.take())
    codec = Codec()
    received = codec.decode([bytes(frame) for frame in codec.encode(sent)])
    assert received.steps.running.dtype == np.int32 and received.steps.seconds.dtype == np.float32
    assert received.steps.running.tolist() == ([2] if filled else [])
    assert received.steps.seconds.tolist() == ([0.25] if filled else [])
