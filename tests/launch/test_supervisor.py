"""How often a controller that was killed is started again, on a clock of the test's."""

import signal

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.launch.supervised import DAMAGED_CHECKPOINT
from laminar.launch.supervisor import Supervisor

CONFIG = {
    "name": "test",
    "model": {"path": "unused"},
    "data": {"source": {"type": "jsonl", "path": "unused.jsonl"}},
    "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
    "controller": {"restarts": 2},
}


class Clocked(Supervisor):
    """Its controllers live for so many seconds each, and end with these exit statuses; 0 ends the run."""

    def __init__(self, folder, lives, status=-signal.SIGKILL):
        self.seconds, self.lives, self.status = 0.0, list(lives), status
        config = ExperimentConfig.model_validate(CONFIG)
        super().__init__(config, folder, "test-supervisor", now=lambda: self.seconds)

    async def _claim(self):
        pass

    async def _one_controller(self):
        if not self.lives:
            return 0
        self.seconds += self.lives.pop(0)
        return self.status


@pytest.mark.parametrize(
    "lives, left",
    [
        ([1, 1, 1], 0),  # the third within an hour
        ([3000, 1, 1], 0),
        ([3000, 3000, 3000], None),  # each looks back on one more only
        ([86400] * 10, None),
        ([86400, 1, 1, 1], 1),
        ([1, 1, 3600, 1, 3600, 3600], None),
    ],
)
async def test_a_controller_is_started_again_so_often_within_an_hour(tmp_path, lives, left, capsys):
    supervisor = Clocked(tmp_path, lives)
    status = await supervisor.run()
    said = capsys.readouterr().out
    if left is None:
        assert (status, supervisor.lives) == (0, [])
        assert said.count("starting it again") == len(lives)
    else:
        assert (status, len(supervisor.lives)) == (1, left)
        assert "is not started again: controller.restarts, for an hour, is used up" in said
        assert f"laminar train --resume {tmp_path} goes on with the run" in said


async def test_a_run_that_a_person_has_stopped_is_not_taken_up_from_an_older_checkpoint(tmp_path):
    assert await Clocked(tmp_path, [1], DAMAGED_CHECKPOINT).run() == DAMAGED_CHECKPOINT
    supervisor = Clocked(tmp_path, [1], DAMAGED_CHECKPOINT)
    supervisor._stopping = True
    assert await supervisor.run() == 2
