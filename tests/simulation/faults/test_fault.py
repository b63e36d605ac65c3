"""Faults print, compare, and go through JSON unchanged."""

import json

import pytest

from laminar.errors import UserError
from laminar.simulation.faults import fault as faults


def one_of_each():
    return [
        faults.Kill(at=1.5, worker="rollout-1"),
        faults.Kill(at=1.5, moment="publish", delay_s=0.25, worker="relay-0"),
        faults.Fail(at=1.5, worker="rollout-1"),
        faults.Hang(at=2.0, worker="trainer", seconds=3.0),
        faults.Partition(at=2.0, worker="environment-0", seconds=3.0),
        faults.SlowLink(at=2.0, worker="relay-2", seconds=3.0, extra_s=0.5),
        faults.Duplicates(at=2.0, worker="rollout-0", seconds=3.0, probability=0.5),
        faults.BadReward(at=0.0, how="nan", count=2),
        faults.FailedCheckpoint(at=0.0, count=1),
        faults.Pause(at=4.0, generation=True, training=False, seconds=10.0),
        faults.Stop(at=9.0),
        faults.RelayTierLost(at=9.0, moment="broadcast", delay_s=0.1),
        faults.Add(at=3.0, count=2),
        faults.Remove(at=3.0, worker="rollout-1"),
        faults.Drain(at=3.0, moment="loss", worker="rollout-1"),
        faults.SpotNotice(at=3.0, worker="rollout-1", seconds=5.0),
        faults.BadTurn(at=0.0, how="raise", count=1),
        faults.ControllerLost(at=9.0, moment="loss", delay_s=0.1),
        faults.HostLost(at=9.0, relay=1),
    ]


@pytest.mark.parametrize("fault", one_of_each(), ids=repr)
def test_a_fault_goes_through_json_unchanged(fault):
    assert faults.from_json(json.loads(json.dumps(faults.to_json(fault)))) == fault


def test_every_kind_is_covered_above():
    assert {type(fault) for fault in one_of_each()} == set(faults.FAULTS.values())


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "Flood", "at": 1.0},
        {"at": 1.0},
        {"kind": "Kill", "at": 1.0},
        {"kind": "Stop", "at": 1.0, "worker": "rollout-0"},
        {"kind": "Stop", "at": 1.0, "moment": "noon"},
    ],
)
def test_what_is_no_fault_is_refused_by_name(entry):
    with pytest.raises(UserError, match="expected"):
        faults.from_json(entry)


def test_kinds_are_counted_by_kind_of_worker():
    kinds = [faults.kind_of(fault) for fault in one_of_each()]
    assert kinds[0] == "Kill rollout" and kinds[3] == "Hang trainer" and kinds[-1] == "HostLost"
