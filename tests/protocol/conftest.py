import pytest

from laminar.protocol.connection import CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel


@pytest.fixture
async def keys():
    """The controller's and the workers'."""
    return CurveKeys.create(), CurveKeys.create()


@pytest.fixture
async def controller(keys):
    channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys[0], worker_public_key=keys[1].public)
    yield channel
    channel.close()
