"""The event log: one line a thing, the same bytes in every process."""

import os
import subprocess
import sys

import numpy as np

from laminar.observability.events import Notice
from laminar.protocol.messages import Heartbeat, LoadCheckpoint, WeightsPulled
from laminar.simulation.faults.event_log import EventLog, describe
from laminar.trajectory import Prompt, Trajectory

DIGESTS = """
from laminar.simulation.faults.explore import replay
print([replay(seed).digest for seed in (3, 7, 11, 19)])
"""


def test_the_log_of_a_seed_is_the_same_in_every_process():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "271828")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(eval(outputs[0]))) == 4


def test_lines_say_when_and_what():
    log = EventLog(keep_all=True)
    log.event(1.5, Notice(level="info", text="hello"))
    log.message(2.25, "rollout-0#1 -> controller", WeightsPulled(policy_version=3, seconds=0.5, nbytes=8))
    log.message(2.5, "rollout-0#1 -> controller", Heartbeat())  # left out
    log.fault(3.0, "something strikes")
    assert log.text().splitlines() == [
        "    1.500000  event    Notice level='info' text='hello'",
        "    2.250000  message  rollout-0#1 -> controller: WeightsPulled policy_version=3 seconds=0.5 nbytes=8",
        "    3.000000  fault    something strikes",
    ]
    assert log.count == 3


def test_the_digest_is_of_all_lines_though_only_the_last_are_kept():
    short, whole = EventLog(), EventLog(keep_all=True)
    for number in range(200):
        short.fault(number, "x")
        whole.fault(number, "x")
    assert short.digest == whole.digest
    assert len(short.lines) < len(whole.lines) == 200
    whole.fault(200, "y")
    assert short.digest != whole.digest


def test_no_path_of_this_machine_and_no_address_is_printed():
    assert (
        describe(LoadCheckpoint(order=4, step=1, path="/home/somebody/run/step-1"))
        == "LoadCheckpoint order=4 step=1 path='step-1'"
    )
    prompt = Prompt(prompt_id=4, source="s", text="t", token_ids=np.arange(9, dtype=np.int32), answer="", metadata="")
    trajectory = Trajectory(trajectory_id="1.0", group_id=1, prompt=prompt)
    text = describe(trajectory)
    assert "0x" not in text and "prompt 4" in text
