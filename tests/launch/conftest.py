import pytest

from tests.launch.live_run import LiveRun, write_config
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, seed=0)
    return path


@pytest.fixture
async def runs():
    """The runs of a test, for it to append to: whatever is left of them at its end is killed."""
    made = []
    yield made
    for run in made:
        await run.kill_what_is_left()


@pytest.fixture
def start(tmp_path, model, runs):
    """Starts a run by options of the command line and overrides of the experiment's keys."""

    async def start(*options, name="run", **overrides):
        config, run_name = write_config(tmp_path, model, **overrides)
        run = await LiveRun(config, tmp_path / name, run_name, *options).start()
        runs.append(run)
        return run

    return start
