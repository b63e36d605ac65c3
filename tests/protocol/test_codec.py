"""Messages survive the wire; anything else is refused."""

import msgspec
import numpy as np
import pytest

from laminar.protocol import messages
from laminar.protocol.codec import Codec, CodecError

DELTAS = messages.TrajectoryDeltas(
    policy_version=4,
    trajectory_ids=("0.0", "0.1"),
    starts=np.array([0, 5], np.int32),
    leases=(1, 2),
    token_counts=np.array([2, 1], np.int32),
    token_ids=np.array([5, 6, 7], np.int32),
    logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
    finish_reasons=(None, "stop"),
    load=messages.RolloutLoad(running=1, waiting=0, kv_utilization=0.25),
)


def wire(message):
    codec = Codec()
    return codec.decode([bytes(frame) for frame in codec.encode(message)])


def test_arrays_and_nested_messages_come_back_equal():
    back = wire(DELTAS)
    assert back.load == DELTAS.load
    assert back.finish_reasons == (None, "stop")
    for name in ("token_counts", "token_ids", "logprobs"):
        sent, got = getattr(DELTAS, name), getattr(back, name)
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)
        assert not got.flags.writeable


def test_arrays_of_nested_records_come_back_in_their_places():
    prompts = tuple(
        messages.PromptRecord(
            prompt_id=k, source="s", text="t", token_ids=np.arange(k, dtype=np.int32), answer="", metadata="{}"
        )
        for k in range(3)
    )
    back = wire(messages.PromptsFetched(start=0, prompts=prompts, exhausted=False))
    assert [record.token_ids.tolist() for record in back.prompts] == [[], [0], [0, 1]]


def test_arrays_are_not_copied_on_the_way_out():
    frames = Codec().encode(DELTAS)
    assert np.shares_memory(np.frombuffer(frames[4], np.int32), DELTAS.token_ids)


def header(**fields):
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"Heartbeat"], "at least 2 frames"),
        ([b"os.system", header()], "unknown message type"),
        ([b"Heartbeat", b"\xc1"], "malformed Heartbeat"),
        ([b"Shutdown", header(reason=3)], "malformed Shutdown: Expected `str`"),
        ([b"Shutdown", header()], "malformed Shutdown: .*reason"),
        ([b"TrainStep", header(step=1)], "malformed TrainStep"),
    ],
)
def test_refuses_what_is_not_a_message(frames, reason):
    with pytest.raises(CodecError, match=reason):
        Codec().decode(frames)


@pytest.mark.parametrize("description", [[0, "object", 1], [5, "int32", 1], [0, "int32", 2], "x", [0, "int32"]])
def test_refuses_arrays_that_do_not_fit_their_description(description):
    record = {
        "prompt_id": 0,
        "source": "s",
        "text": "t",
        "token_ids": description,
        "answer": "",
        "metadata": "{}",
    }
    frames = [b"PromptsFetched", header(start=0, prompts=[record], exhausted=False), b"\1\0\0\0"]
    with pytest.raises(CodecError, match="malformed PromptsFetched"):
        Codec().decode(frames)


def test_refuses_to_send_what_is_not_declared():
    with pytest.raises(CodecError, match="dict is not a message"):
        Codec().encode({"reason": "x"})
