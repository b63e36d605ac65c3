"""The environment worker: `python -m laminar.workers.environment.main --connect RUN_DIR --index I`.

It makes prompts (source, template, tokenizer), answers turns (the environment) and scores responses (the user's rewards), many
at once. Invariant: every question gets exactly one answer; a reward that fails, hangs or crashes is an answer with an error
and delays no other, and a row of the data that cannot be used is a prompt with an error. The controller restarts a worker that does not answer in
time all the same: code of the user's that blocks the thread's loop, say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from laminar.config.data_schema import FileSource, ReasoningGymSource, SingleSource
from laminar.config.held_out import held_out, in_its_words
from laminar.config.schema import ExperimentConfig
from laminar.data.metadata import decode_metadata, encode_metadata
from laminar.data.observation import ObservationEncoder
from laminar.data.open_source import open_source, total_prompts
from laminar.data.source import Entry, PromptSource
from laminar.data.tokenize import PromptEncoder, load_tokenizer
from laminar.environments.environment import EnvironmentPrompt
from laminar.environments.registry import load_environment
from laminar.errors import UserError
from laminar.protocol.messages import (
    FetchPrompts,
    PromptRecord,
    PromptsFetched,
    ScoreTrajectory,
    StepEnvironment,
    TrajectoryScored,
)
from laminar.rewards.conventions import RewardInput
from laminar.workers.environment.episodes import NO_TOKENS, BeginFailed, Episodes
from laminar.workers.environment.reward_lanes import RewardLanes
from laminar.workers.environment.scoring import Scoring
from laminar.workers.environment.user_code import UserCodeThread
from laminar.workers.rollout.stop_tokens import stop_token_ids
from laminar.workers.worker import WorkerSession, run_worker

CLOSE_LIMIT_S = 5.0


@dataclass(kw_only=True, slots=True)
class Environment:
    """Data, tokenizer, environment and reward."""

    config: ExperimentConfig
    thread: UserCodeThread
    source: PromptSource
    total: int | None  # positions in the data order, None when it never ends
    encoder: PromptEncoder
    scoring: Scoring
    episodes: Episodes | None  # None: trajectories have a single turn

    async def prompt(self, position: int) -> PromptRecord:
        """The tokenized prompt at a position of the data order, with what the environment says to it at first.

        In the user-code thread only. One that cannot be used says why.

        Raises:
            UserError: the environment could not begin with it, and that is to stop the run.
        """
        entry, token_ids, error = Entry(source=describe_data(self.config), question="", answer=""), NO_TOKENS, ""
        try:
            entry = self.source.entry(position)
            first = await self._first_observation(entry)
            token_ids = self.encoder.encode(replace(entry, question=entry.question + first))
        except UserError as failure:  # a row that cannot be used; others can be
            error = str(failure)
        except BeginFailed as failure:
            error = f"environment {self.config.environment.name} could not begin with it: {failure}"
            if self.config.environment.on_error == "fail":
                raise UserError(
                    f"prompt {position} of {entry.source}: {error}. Set environment.on_error: drop to leave such prompts "
                    "out and count them"
                ) from failure
        return PromptRecord(
            prompt_id=position,
            source=entry.source,
            text=entry.question,
            token_ids=token_ids,
            answer=entry.answer,
            metadata=encode_metadata(entry.metadata),
            error=error,
        )

    async def _first_observation(self, entry: Entry) -> str:
        if self.episodes is None:
            return ""
        prompt = EnvironmentPrompt(
            text=entry.question, answer=entry.answer, metadata=entry.metadata, source=entry.source
        )
        retries_left = self.config.environment.retries
        while True:
            try:
                return await self.episodes.first_observation(prompt)
            except BeginFailed:
                if not retries_left:
                    raise
                retries_left -= 1

    async def score(self, message: ScoreTrajectory) -> TrajectoryScored:
        """Decode a response and ask the reward, about its last turn."""
        response, last_turn = await self.thread.call(self._texts, message)
        score = await self.scoring.score(
            RewardInput(
                trajectory_id=message.trajectory_id,
                prompt=message.prompt_text,
                response=last_turn,
                answer=message.answer,
                metadata=decode_metadata(message.metadata),
                source=message.source,
                num_tokens=len(message.token_ids),
            )
        )
        return TrajectoryScored(
            trajectory_id=message.trajectory_id,
            reward=score.reward,
            parts=score.parts,
            response_text=response,
            error=score.error,
        )

    def _texts(self, message: ScoreTrajectory) -> tuple[str, str]:
        """The whole response, and its last turn."""
        response = last_turn = self.encoder.decode(message.token_ids)
        if message.turn_start > 0 or message.turn_end < len(message.token_ids):
            last_turn = self.encoder.decode(message.token_ids[message.turn_start : message.turn_end])
        return response, last_turn


@dataclass(kw_only=True, slots=True, frozen=True)
class Environments:
    """For prompts that are trained on, and for those that are held out."""

    training: Environment
    held_out: Environment | None  # None: the experiment has no evaluation

    def of(self, message: FetchPrompts | ScoreTrajectory | StepEnvironment) -> Environment:
        """The one that a question is for."""
        if not message.evaluation:
            return self.training
        if self.held_out is None:
            raise RuntimeError("an environment worker was asked for evaluation, and the experiment has none")
        return self.held_out

    async def close(self) -> None:
        """Let go of the user's environments."""
        for environment in (self.training, self.held_out):
            if environment is not None and environment.episodes is not None:
                with contextlib.suppress(TimeoutError):  # the user's code; the process ends all the same
                    async with asyncio.timeout(CLOSE_LIMIT_S):
                        await environment.thread.run(environment.episodes.close())


async def open_environments(
    session: WorkerSession, thread: UserCodeThread, lanes: RewardLanes, held_out_lanes: RewardLanes
) -> Environments:
    """Load everything, telling what is being waited for.

    Raises:
        UserError: the model's tokenizer, the data or the reward is at fault.
    """
    config = session.config
    await lanes.start(config)
    await session.progress(f"loading the tokenizer of {config.model.path}")
    tokenizer = await thread.call(load_tokenizer, config.model.path)
    encoder = await thread.call(PromptEncoder, tokenizer, config.data)
    training = await _open(session, thread, lanes, tokenizer, encoder, config)
    if config.evaluation is None:
        return Environments(training=training, held_out=None)
    view = held_out(config)
    try:
        await held_out_lanes.start(view)
        return Environments(
            training=training, held_out=await _open(session, thread, held_out_lanes, tokenizer, encoder, view)
        )
    except UserError as error:
        raise UserError(in_its_words(str(error))) from error


async def _open(
    session: WorkerSession,
    thread: UserCodeThread,
    lanes: RewardLanes,
    tokenizer: Any,
    encoder: PromptEncoder,
    config: ExperimentConfig,
) -> Environment:
    await session.progress(f"opening {describe_data(config)}")
    source = await thread.call(open_source, config)
    await session.progress(f"loading the reward {config.reward.title}")
    scoring = Scoring(config, lanes, thread)
    await scoring.start()
    return Environment(
        config=config,
        thread=thread,
        source=source,
        total=total_prompts(config, source),
        encoder=encoder,
        scoring=scoring,
        episodes=await thread.call(load_episodes, config, tokenizer, scoring, asyncio.get_running_loop()),
    )


def load_episodes(
    config: ExperimentConfig, tokenizer: Any, scoring: Scoring, loop: asyncio.AbstractEventLoop
) -> Episodes | None:
    """What answers turns, where trajectories have several; `loop` is the worker's, in which scores are made.

    Raises:
        UserError: the environment, or the chat template, is at fault.
    """
    if not config.environment.multi_turn:
        return None

    async def score(prompt: EnvironmentPrompt, response: str) -> float:
        request = RewardInput(
            trajectory_id="under way",
            prompt=prompt.text,
            response=response,
            answer=prompt.answer,
            metadata=prompt.metadata,
            source=prompt.source,
            num_tokens=len(tokenizer.encode(response, add_special_tokens=False)),
        )
        scored = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scoring.score(request), loop))
        if scored.error:
            raise RuntimeError(scored.error)
        return scored.reward

    encoder = ObservationEncoder(
        tokenizer,
        chat=config.data.chat,
        max_tokens=config.environment.max_observation_tokens,
        stop_token_ids=stop_token_ids(config.model.path),
    )
    make = load_environment(config.environment, score)
    return Episodes(make, encoder, limit_s=config.environment.step_timeout_s)


def describe_data(config: ExperimentConfig) -> str:
    """The data in a few words."""
    return " + ".join(_describe_source(source) for _, source in config.data.single_sources())


def _describe_source(source: SingleSource) -> str:
    if isinstance(source, ReasoningGymSource):
        return f"reasoning-gym: {', '.join(component.name for component in source.datasets)}"
    assert isinstance(source, FileSource)
    return source.path


async def serve(session: WorkerSession) -> None:
    """Make prompts and score trajectories."""
    thread, lanes, held_out_lanes = UserCodeThread(), RewardLanes(), RewardLanes()
    try:
        environments = await open_environments(session, thread, lanes, held_out_lanes)
        size = environments.training.source.size
        await session.ready(
            f"{'endless' if size is None else f'{size} prompts'} from {describe_data(session.config)}, "
            f"reward {session.config.reward.title}"
            + (f", environment {session.config.environment.name}" if session.config.environment.multi_turn else "")
        )
        try:
            await answer_messages(session, thread, environments)
        finally:
            await environments.close()
    finally:
        thread.stop()
        await lanes.stop()
        await held_out_lanes.stop()


async def answer_messages(session: WorkerSession, thread: UserCodeThread, environments: Environments) -> None:
    """A task for every question, until `Shutdown`; what is unanswered then is given up.

    Raises:
        UserError: the user wants the run to stop on what the environment did.
    """

    async def fetch(message: FetchPrompts) -> None:
        environment = environments.of(message)
        stop = message.start + message.count
        end = stop if environment.total is None else min(stop, environment.total)
        # One position at a time: rewards get their turn in between.
        prompts = [await thread.run(environment.prompt(position)) for position in range(message.start, end)]
        exhausted = environment.total is not None and stop >= environment.total
        await session.send(
            PromptsFetched(
                start=message.start, prompts=tuple(prompts), exhausted=exhausted, evaluation=message.evaluation
            )
        )

    async def step(message: StepEnvironment) -> None:
        episodes = environments.of(message).episodes
        if episodes is None:
            raise RuntimeError(f"trajectory {message.trajectory_id} has a turn to answer, but there is no environment")
        await session.send(await thread.run(episodes.step(message)))

    async def score(message: ScoreTrajectory) -> None:
        await session.send(await environments.of(message).score(message))

    def start(tasks: asyncio.TaskGroup, message: Any) -> asyncio.Task[None]:
        if isinstance(message, FetchPrompts):
            return tasks.create_task(fetch(message), name=f"prompts from {message.start}")
        if isinstance(message, ScoreTrajectory):
            return tasks.create_task(score(message), name=f"score {message.trajectory_id}")
        if isinstance(message, StepEnvironment):
            return tasks.create_task(step(message), name=f"turn of {message.trajectory_id}")
        raise RuntimeError(f"an environment worker has no answer to {type(message).__name__}")

    try:
        async with asyncio.TaskGroup() as tasks:
            unanswered: set[asyncio.Task[None]] = set()
            async for message in session.messages():
                task = start(tasks, message)
                unanswered.add(task)
                task.add_done_callback(unanswered.discard)
            for task in unanswered:
                task.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first failure; the others were cancelled because of it


def fix_hash_seed() -> None:
    """Start this process anew, as the same process, with a fixed order of sets of text.

    Some generators (word_ladder, isomorphic_strings, ...) walk over sets: without it each process would make its own
    prompts of the same seed. A launcher that sets PYTHONHASHSEED=0 itself saves the second start.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    fix_hash_seed()
    run_worker("environment", serve)
