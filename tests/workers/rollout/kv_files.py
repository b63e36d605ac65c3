"""Files of KV for the tests."""

import numpy as np

from laminar.workers.rollout.kv_file import KvWriter, shard_path

LAYOUT = "a test's layout"


def write_kv(path, *, tokens=10, nbytes=1000, version=3, shard=0, layout=LAYOUT):
    """Write a file of KV; returns its content."""
    payload = np.random.default_rng(tokens + shard).integers(0, 256, nbytes, np.uint8)
    ids = np.arange(tokens, dtype=np.int32)
    with KvWriter(
        shard_path(path, shard), layout=layout, policy_version=version, token_ids=ids, nbytes=nbytes
    ) as writer:
        writer.buffer[:] = payload
        writer.commit()
    return payload
