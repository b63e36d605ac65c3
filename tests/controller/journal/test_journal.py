"""What a controller writes down is what the next one finds: over whole runs, in virtual time."""

import asyncio
import json
import sqlite3

import pytest

from laminar.controller.journal.accounts import accounts
from laminar.controller.journal.restore import restore
from laminar.controller.journal.tables import FORMAT, JOURNAL, create_journal, create_tables, open_journal
from laminar.controller.journal.trainer_order import TrainerOrder
from laminar.controller.journal.writer import ThreadWriter, Transaction, apply
from laminar.errors import UserError
from laminar.observability import events as kinds
from laminar.simulation.cluster import RunOptions
from laminar.trajectory import TrajectoryState
from tests.simulation.small_cluster import Recorded, experiment


def journalled(at=(), **overrides):
    """A run that loses its controller at these times."""
    options = RunOptions(heartbeats=True, journal_s=0.01, restart_s=0.5, controller_restart_s=0.5)
    run = Recorded(experiment(trainer__steps=6, trainer__checkpoint_every=2, **overrides), options=options)
    for seconds in at:
        run.at(seconds, lambda made: made.lose_controller())
    return run


def consumed(run):
    return {event.step: sorted(group.group_id for group in event.groups) for event in run.of(kinds.StepFinished)}


def test_the_state_in_the_middle_of_a_run_is_found_again():
    seen = {}

    def look(made):
        controller = made.controller
        made.loop.call_later(0.02, lambda: seen.update(found=restore(made.journal._connection)))
        seen["outstanding"] = {
            group.group_id: [(t.trajectory_id, t.lease, t.policy_version, t.rollout) for t in group.trajectories]
            for group in controller.buffer
        }
        seen["step"], seen["version"] = controller.trainer.step, controller.trainer.policy_version

    journalled().at(3.0, look).to_the_end()
    found = seen["found"]
    assert (found.step, found.policy_version) == (seen["step"], seen["version"]) and found.step > 0
    restored = {
        group.group_id: [(t.trajectory_id, t.lease, t.policy_version, t.rollout) for t in group.trajectories]
        for group in (*found.outstanding, *found.in_training)
    }
    assert restored.keys() >= seen["outstanding"].keys()
    assert all(restored[group_id] == members for group_id, members in seen["outstanding"].items())
    assert found.next_group == found.cursor == max(restored) + 1
    finished = [t for group in found.outstanding for t in group.trajectories if t.finish_reason]
    assert finished and all(len(t.response_token_ids()) == len(t.response_logprobs()) > 0 for t in finished)
    assert any(t.state is TrajectoryState.GENERATING for group in found.outstanding for t in group.trajectories)


@pytest.mark.parametrize("moment", [0.7, 1.6, 2.1, 2.4, 2.7, 3.0])
def test_a_run_whose_controller_is_lost_trains_what_it_would_have_trained(moment):
    run = journalled([moment]).to_the_end()
    assert sorted(consumed(run)) == [1, 2, 3, 4, 5, 6]
    assert sorted(group for groups in consumed(run).values() for group in groups) == list(range(24))
    assert not run.of(kinds.WorkerReplaced) and not run.of(kinds.TrajectoryRestarted)
    assert not run.of(kinds.TrainerRestarted), "the trainer goes on where it was"


def test_rollouts_generate_nothing_twice_when_the_controller_is_lost():
    def generated(run):
        return {name: worker.generated_tokens for name, worker in run.run.workers.items() if worker.kind == "rollout"}

    undisturbed, struck = journalled().to_the_end(), journalled([2.4]).to_the_end()
    assert sum(generated(struck).values()) == sum(generated(undisturbed).values())


def test_a_controller_may_be_lost_again_while_its_successor_begins():
    run = journalled([1.7, 2.25, 2.3, 2.9]).to_the_end()
    assert sorted(group for groups in consumed(run).values() for group in groups) == list(range(24))
    found = accounts(run.run.journal._connection)
    assert not found.problems
    assert (found.positions, found.trained, found.in_flight) == (24, 24, 0)
    assert found.steps == dict.fromkeys(range(1, 7), 4)


def test_a_pause_outlives_the_controller_until_it_is_undone():
    run = journalled([1.8, 6.2])
    asked = []
    run.at(1.6, lambda made: made.controller.control.pause(generation=True, training=True))
    for seconds in (4.0, 6.0):
        run.at(seconds, lambda made: asked.append((made.controller.control.asked, len(consumed(run)))))
    run.at(6.0, lambda made: made.controller.control.resume(generation=True, training=True))
    run.at(8.0, lambda made: asked.append((made.controller.control.asked, 0)))
    run.to_the_end()
    before, after, again = asked
    assert before == after == (("pause generation", "pause training"), after[1]) and after[1] < 6
    assert again == ((), 0)
    assert sorted(group for groups in consumed(run).values() for group in groups) == list(range(24))


def test_a_stop_outlives_the_controller_and_ends_the_run_with_a_checkpoint():
    run = journalled([2.8]).at(2.7, lambda made: made.controller.control.stop()).to_the_end()
    last = max(consumed(run))
    assert last == run.run.controller.trainer.checkpoints.newest.step < 6
    assert restore(run.run.journal._connection).asked == ("stop",)


def test_accounts_that_do_not_add_up_say_so():
    run = journalled().to_the_end()
    connection = run.run.journal._connection
    connection.execute("DELETE FROM groups WHERE group_id = 3")
    connection.execute("UPDATE groups SET step = 9 WHERE group_id = 5")
    problems = "; ".join(accounts(connection).problems)
    assert "24 positions, 23 drawn and 0 rejected" in problems
    assert "trained in steps [9], the trainer is at step 6" in problems


def test_tokens_of_steps_that_a_checkpoint_holds_are_forgotten():
    run = journalled(trainer__keep_checkpoints=1).to_the_end()
    connection = run.run.journal._connection
    for table in ("prompts", "trajectories", "tokens"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_orders_go_through_json_unchanged():
    order = TrainerOrder(number=7, kind="train", step=3, part=1, policy_version=4, group_ids=(5, 6))
    assert TrainerOrder.from_json(order.to_json()) == order


# ------------------------------------------------------------ the file


def test_what_is_no_journal_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / JOURNAL
    with pytest.raises(UserError, match="no such file, so this is no run that can be resumed"):
        open_journal(path)
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match="damaged, or not a journal"):
        open_journal(path)
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    foreign.execute("INSERT INTO meta VALUES ('format', 'laminar journal 99')")
    foreign.commit()
    foreign.close()
    with pytest.raises(UserError, match=f"'laminar journal 99', expected '{FORMAT}'"):
        open_journal(path)


def test_a_journal_is_its_owners_alone(tmp_path):
    create_journal(tmp_path / JOURNAL)
    assert (tmp_path / JOURNAL).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_journal(tmp_path / JOURNAL)


def test_a_transaction_is_written_whole_or_not_at_all():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(connection)
    insert = "INSERT INTO groups (group_id, prompt_id) VALUES (?, ?)"
    with pytest.raises(sqlite3.IntegrityError):
        apply(connection, [(insert, (1, 1)), (insert, (2, 1))])
    assert connection.execute("SELECT count(*) FROM groups").fetchone() == (0,)


async def test_the_thread_writes_in_order_and_tells(tmp_path):
    path = tmp_path / JOURNAL
    create_journal(path)
    writer = ThreadWriter(path, on_trouble=pytest.fail, on_failure=pytest.fail)
    done = asyncio.Queue()
    for number in range(3):
        statement = ("INSERT OR REPLACE INTO meta VALUES ('number', ?)", (json.dumps(number),))
        writer.submit(
            Transaction(statements=[statement], durable=number == 2, done=lambda n=number: done.put_nowait(n))
        )
    assert [await asyncio.wait_for(done.get(), 10) for _ in range(3)] == [0, 1, 2]
    writer.close()
    assert open_journal(path).execute("SELECT value FROM meta WHERE key = 'number'").fetchone() == ("2",)


async def test_what_contradicts_the_journal_is_told(tmp_path):
    path = tmp_path / JOURNAL
    create_journal(path)
    failures = asyncio.Queue()
    writer = ThreadWriter(path, on_trouble=pytest.fail, on_failure=failures.put_nowait)
    insert = "INSERT INTO groups (group_id, prompt_id) VALUES (?, ?)"
    writer.submit(Transaction(statements=[(insert, (1, 1)), (insert, (1, 1))], durable=False, done=pytest.fail))
    assert isinstance(await asyncio.wait_for(failures.get(), 10), sqlite3.IntegrityError)
    writer.close()
