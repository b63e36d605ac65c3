"""A small abstract world that drives one schedule: rollouts, a trainer and a buffer, without tasks, messages or time.

Invariants, checked at every move: no group is trained staler than the bound allows; each is trained once, unless the
trainer lost its step; a step has its size; and nothing dead-locks.
"""

import random
from dataclasses import dataclass

from laminar.controller.buffer_strategies import Fifo, Freshest, StalenessWeighted, UserStrategy, evictions
from laminar.controller.schedules.laminar import LaminarSchedule
from laminar.controller.schedules.one_step import OneStepSchedule
from laminar.controller.schedules.partial import PartialSchedule
from laminar.controller.schedules.schedule import ReadyGroup
from laminar.controller.schedules.stream import StreamSchedule
from laminar.controller.schedules.synchronous import SynchronousSchedule

SCHEDULES = ("laminar", "synchronous", "one_step", "stream", "partial")
STRATEGIES = ("fifo", "freshest", "staleness_weighted", "picky")
MOST_MOVES = 20_000


@dataclass(kw_only=True)
class Setting:
    """What a world is like; `seed` decides the order of everything that happens in it."""

    name: str = "laminar"
    strategy: str = "fifo"
    batch: int = 2
    parts: int = 1  # of `stream`; divides `batch`
    bound: int | None = 1
    steps: int = 6
    rollouts: int = 2
    prompts: int | None = None  # None: without end
    drops: int = 0  # groups that fail
    losses: int = 0  # restarts of the trainer
    on_stale: str = "drop"
    capacity: int | None = None
    max_age: int | None = None
    finish: str = "any"  # which group finishes next: "any" | "newest" | "oldest"
    seed: int = 0


def make(setting, classes=None):
    """The schedule of a setting; `classes` may put others in the place of the real ones."""
    kinds = {
        "laminar": LaminarSchedule,
        "partial": PartialSchedule,
        "synchronous": SynchronousSchedule,
        "one_step": OneStepSchedule,
        "stream": StreamSchedule,
    } | (classes or {})
    kind = kinds[setting.name]
    common = {"groups_per_step": setting.batch}
    if setting.name == "synchronous":
        return kind(**common)
    common["max_staleness"] = setting.bound
    if setting.name == "one_step":
        return kind(**common)
    if setting.name == "stream":
        return kind(**common, parts=setting.parts)
    return kind(**common, strategy=make_strategy(setting))


def make_strategy(setting):
    """A built-in, or `picky`: a user's own that leaves out half of the groups."""
    if setting.strategy == "staleness_weighted":
        return StalenessWeighted(half_life=1.0, seed=setting.seed)
    if setting.strategy == "picky":
        return UserStrategy("picky", lambda ready, *, published_version: [g for g in ready if g.group_id % 2][::-1])
    return {"fifo": Fifo, "freshest": Freshest}[setting.strategy]()


class World:
    """Its state is what the controller keeps; a move is one thing that may happen next."""

    def __init__(self, setting, schedule):
        self.setting, self.schedule = setting, schedule
        self.rng = random.Random(setting.seed)
        self.serving = [0] * setting.rollouts  # version that each rollout serves
        self.stored = [0] * setting.rollouts  # the newest version that its relay holds
        self.running = {}  # group id -> (version, rollout)
        self.ready = {}  # group id -> ReadyGroup
        self.part = 0
        self.taken = []  # groups of the step that is being trained
        self.history = []  # groups of each step made
        self.published = self.admitted = self.started = self.completed = 0
        self.drops, self.losses = setting.drops, setting.losses
        self.staleness = []

    @property
    def ended(self):
        """All steps have been made, or there is nothing left to train."""
        return len(self.history) == self.setting.steps or (
            self.no_more and not self.running and not self.ready and not self.taken
        )

    @property
    def no_more(self):
        return self.started == self.setting.prompts

    @property
    def lost(self):
        return self.published - len(self.history)

    def run(self):
        """Random moves until the end; AssertionError where an invariant breaks."""
        for _ in range(MOST_MOVES):
            if self.ended:
                return self
            self.check_no_dead_lock()
            moves = self.moves()
            assert moves, f"dead-lock: {self.__dict__}"
            self.rng.choice(moves)()
        raise AssertionError(f"no end: {self.__dict__}")

    def moves(self):
        """Everything that may happen now."""
        moves = []
        for k in range(self.setting.rollouts):
            if self.stored[k] < self.published:
                moves.append(lambda k=k: self.store(k))
            if self.serving[k] < self.stored[k]:
                if self.may_pull(k):
                    moves.append(lambda k=k: self.pull(k))
            elif not self.no_more and self.may_admit(self.serving[k]):
                moves.append(lambda k=k: self.start(k))
        if self.running:
            moves += [self.finish] * min(3, len(self.running))
        if self.drops and (self.running or self.ready):
            moves.append(self.fail)
        if self.part < self.schedule.parts and self.select(self.ready.values()):
            moves.append(self.take)
        if self.part == self.schedule.parts or (self.taken and self.no_more and not (self.running or self.ready)):
            moves.append(self.publish)
        if self.losses and self.published:
            moves.append(self.lose)
        return moves

    # ------------------------------------------------------------ rollouts

    def may_admit(self, version):
        return self.schedule.room(
            serving_version=version,
            published_version=self.published,
            outstanding=len(self.outstanding()),
            taken=len(self.taken),
            steps_left=self.setting.steps - len(self.history),
        )

    def may_pull(self, k):
        if self.schedule.interrupts:
            return True
        if self.schedule.synchronizes:
            return not self.running
        return all(rollout != k for _, rollout in self.running.values())

    def store(self, k):
        self.stored[k] = self.rng.randint(self.stored[k] + 1, self.published)

    def pull(self, k):
        self.serving[k] = self.stored[k]

    def start(self, k):
        self.running[self.started] = (self.serving[k], k)
        self.started += 1
        self.admitted += 1

    def finish(self):
        order = {"any": self.rng.choice, "newest": max, "oldest": min}[self.setting.finish]
        group_id = order(sorted(self.running)) if self.rng.random() < 0.9 else self.rng.choice(sorted(self.running))
        version, _ = self.running.pop(group_id)
        if self.rng.random() < 0.05:
            version = self.rng.randint(version, self.published)  # a member had to be generated anew
        self.make_ready(group_id, version)
        self.evict()

    def make_ready(self, group_id, version):
        self.completed += 1
        self.ready[group_id] = ReadyGroup(group_id=group_id, policy_version=version, completed=self.completed)

    # ------------------------------------------------------------ losses

    def fail(self):
        self.drops -= 1
        self.drop(self.rng.choice(sorted([*self.running, *self.ready])))

    def drop(self, group_id):
        assert self.running.pop(group_id, None) or self.ready.pop(group_id, None)
        self.admitted -= 1

    def evict(self):
        limits = {"capacity": self.setting.capacity, "max_age": self.setting.max_age}
        for group_id, reason in evictions(list(self.ready.values()), published_version=self.published, **limits):
            assert reason
            self.drop(group_id)
        assert self.setting.capacity is None or len(self.ready) <= self.setting.capacity

    def lose(self):
        """The trainer restarts from a checkpoint of some earlier step, and may publish that one's weights anew."""
        self.losses -= 1
        kept = self.rng.randint(max(0, len(self.history) - 3), len(self.history))
        back = [*self.taken, *(group for groups in self.history[kept:] for group in groups)]
        del self.history[kept:]
        self.taken, self.part = [], 0
        for group in back:
            self.make_ready(group.group_id, group.policy_version)
        self.published += self.rng.randint(0, 1)
        if self.setting.on_stale == "drop":
            for group_id in self.schedule.stale(self.listed(), published_version=self.published):
                self.drop(group_id)
        self.evict()

    def listed(self):
        running = [(group_id, version, False) for group_id, (version, _) in self.running.items()]
        return running + [(group.group_id, group.policy_version, True) for group in self.ready.values()]

    # ------------------------------------------------------------ trainer

    def outstanding(self):
        return {group_id: version for group_id, version, _ in self.listed()}

    def select(self, ready):
        return self.schedule.select(
            list(ready),
            self.outstanding(),
            published_version=self.published,
            part=self.part,
            no_more_groups=self.no_more,
        )

    def take(self):
        chosen = self.select(self.ready.values())
        size = self.schedule.batch_groups
        assert len(set(chosen)) == len(chosen)
        assert len(chosen) == size or (self.no_more and len(chosen) == len(self.outstanding()) < size)
        for group_id in chosen:
            group = self.ready.pop(group_id)  # fails if it is trained twice, or not complete
            staleness = self.published - group.policy_version
            self.check_staleness(staleness, group)
            self.staleness.append(staleness)
            self.taken.append(group)
        self.part += 1

    def check_staleness(self, staleness, group):
        if self.setting.bound is not None:
            late = self.lost if self.setting.on_stale == "train" else 0
            assert staleness <= self.setting.bound + late, f"{group} at {self.published}: {self.__dict__}"

    def publish(self):
        assert len(self.taken) == self.setting.batch or self.no_more
        self.history.append(self.taken)
        self.published += 1
        self.taken, self.part = [], 0
        self.evict()

    def check_no_dead_lock(self):
        """Once all that is outstanding has finished, a part can be taken, or a group of the newest version can start."""
        if self.part == self.schedule.parts:
            return
        finished = [
            ReadyGroup(group_id=group_id, policy_version=version, completed=self.completed + 1 + group_id)
            for group_id, (version, _) in self.running.items()
        ]
        everything = [*self.ready.values(), *finished]
        if not self.select(everything):
            assert len(everything) < self.schedule.batch_groups, f"dead-lock: {self.__dict__}"
            assert not everything if self.no_more else self.may_admit(self.published), f"dead-lock: {self.__dict__}"
