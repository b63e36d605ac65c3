from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine fails no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def shared_memory():
    """A folder of its own in shared memory, so that nothing of a real run is touched."""
    folder = Path("/dev/shm") / f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)
