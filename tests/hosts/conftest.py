from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as a benchmark that is run finds its neighbours

from network_hosts import NetworkHosts, available


@pytest.fixture
def make_hosts():
    """Makes hosts that are gone after the test; skips where the machine allows none."""
    if reason := available():
        pytest.skip(reason)
    made = []

    def make(count, **limits):
        hosts = NetworkHosts(count, **limits).__enter__()
        made.append(hosts)
        return hosts

    yield make
    for hosts in made:
        hosts.__exit__(None, None, None)
