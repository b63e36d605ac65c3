from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.errors import UserError
from laminar.rewards.conventions import RewardInput
from laminar.rewards.registry import check_reward, load_parts
from laminar.rewards.reward import Reward

GYM = {"type": "reasoning_gym", "datasets": [{"name": "chain_sum"}]}
FILE = {"type": "jsonl", "path": "data.jsonl"}


def config(function: str, source: dict[str, Any] = FILE, **params: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "test",
            "model": {"path": "model"},
            "data": {"source": source},
            "reward": {"function": function, "params": params},
            "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        }
    )


def load_reward(experiment: ExperimentConfig) -> Reward:
    return load_parts(experiment)[0].reward


def score(function: str, data: dict[str, Any] = FILE, params: dict[str, Any] | None = None, **given: Any) -> float:
    request = {"trajectory_id": "t", "prompt": "", "response": "", "answer": "", "metadata": {}, "source": "x", **given}
    reward = load_reward(config(function, data, **(params or {})))
    return asyncio.run(reward.score(RewardInput(**{"num_tokens": 0, **request}))).reward


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """The working directory of a user; writes modules into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write
    for name in set(sys.modules) - known:
        if name.startswith("user_"):
            del sys.modules[name]


def test_built_ins() -> None:
    assert score("exact", response=" a", answer="a") == 1.0
    assert score("numeric", response="so 4", answer="4") == 1.0
    assert score("reasoning_gym", GYM, prompt="q", response=" 7\n", answer="7", source="chain_sum") == 1.0
    assert score("math_verify", response="so $\\frac{2}{4}$", answer="1/2") == 1.0
    assert score("regex", params={"pattern": "<a>.*</a>"}, response="<a>1\n2</a>") == 1.0
    assert score("length_penalty", params={"free_tokens": 10, "max_tokens": 30}, num_tokens=20) == -0.5


def test_options_reach_a_function_of_ones_own(project: Callable[[str, str], None]) -> None:
    project(
        "user_words.py", "def reward(*, response, words, strict=False):\n    return len(response.split()) / words\n"
    )
    assert score("user_words:reward", params={"words": 4}, response="a b") == 0.5
    with pytest.raises(UserError, match=r"reward\.function: user_words:reward needs 'words'"):
        load_reward(config("user_words:reward"))
    with pytest.raises(UserError, match=r"reward\.params\.strct: .*takes no such argument; did you mean strict\?"):
        load_reward(config("user_words:reward", words=1, strct=True))
    with pytest.raises(UserError, match=r"reward\.params\.response: rewards get this with every trajectory"):
        load_reward(config("user_words:reward", words=1, response="x"))


BAD_OPTIONS = [
    ("exact", {"pattern": "x"}, r"reward\.params\.pattern: exact has no such option; it has: none"),
    ("regex", {"patern": "x"}, r"reward\.params\.patern: regex has no such option; did you mean pattern\?"),
    ("regex", {}, r"reward\.params\.pattern: missing; regex needs it: text"),
    ("regex", {"pattern": 3}, r"reward\.params\.pattern: 3; expected text"),
    ("regex", {"pattern": "("}, r"reward\.params\.pattern: not a regular expression: "),
    ("length_penalty", {"max_tokens": 0}, r"reward\.params\.max_tokens: 0; expected integer, at least 1"),
    ("length_penalty", {"free_tokens": 9, "max_tokens": 8}, r"reward\.params\.free_tokens: no room for a slope"),
]


@pytest.mark.parametrize(("function", "params", "message"), BAD_OPTIONS)
@pytest.mark.parametrize("entry_point", [check_reward, load_reward])
def test_bad_options(function: str, params: dict[str, Any], message: str, entry_point: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=message):
        entry_point(config(function, **params))


def test_a_dotted_path_from_the_working_directory(project: Callable[[str, str], None]) -> None:
    project("user_tasks/__init__.py", "")
    project(
        "user_tasks/poems.py", "def reward(*, response, metadata):\n    return len(response) / metadata['longest']\n"
    )
    check_reward(config("user_tasks.poems:reward"))
    assert "user_tasks" not in sys.modules  # looking for it runs nothing of it
    assert score("user_tasks.poems:reward", response="abc", metadata={"longest": 6}) == 0.5


def test_a_method_of_a_class_or_object(project: Callable[[str, str], None]) -> None:
    project(
        "user_judge.py", "class Judge:\n    def score(self, *, response):\n        return 0.75\n\njudge = Judge()\n"
    )
    check_reward(config("user_judge:judge.score"))
    assert score("user_judge:judge.score") == 0.75
    with pytest.raises(UserError, match=r"user_judge has no 'judge\.rank'"):
        load_reward(config("user_judge:judge.rank"))


def test_what_reading_cannot_see_is_left_to_the_import(project: Callable[[str, str], None]) -> None:
    project("user_base.py", "def make():\n    return lambda response: 0.5\n")
    project("user_star.py", "from user_base import *\nreward = make()\n")
    project("user_lazy.py", "def __getattr__(name):\n    return lambda response: 0.25\n")
    for function, reward in (("user_star:reward", 0.5), ("user_star:make", None), ("user_lazy:anything", 0.25)):
        check_reward(config(function))
        if reward is not None:
            assert score(function) == reward


BAD_PATHS = [
    ("user_missing:reward", r"there is no module user_missing in the working directory \("),
    ("user_missing.sub:reward", r"there is no package user_missing in the working directory \("),
    ("user_tasks.missing:reward", r"there is no module missing in user_tasks \("),
    ("user_tasks.poems.sub:reward", r"there is no package poems in user_tasks"),
    ("user_tasks.poems:rewarding", r"user_tasks\.poems has no 'rewarding'; its functions are: reward"),
    ("user_broken:reward", r"user_broken\.py:2: "),
]


@pytest.mark.parametrize(("function", "message"), BAD_PATHS)
def test_wrong_paths_are_found_without_running_anything(
    project: Callable[[str, str], None], function: str, message: str
) -> None:
    project("user_tasks/__init__.py", "raise SystemExit('ran')")
    project("user_tasks/poems.py", "def reward(*, response):\n    return 0\n\nVALUE = 3\n")
    project("user_broken.py", "def reward(response):\nreturn 1\n")
    with pytest.raises(UserError, match=r"reward\.function: user_.*" + message):
        check_reward(config(function))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import user_no_such_thing\n", "importing user_module failed: ModuleNotFoundError: No module named"),
        ("1 / 0\n", r"importing user_module failed: ZeroDivisionError: division by zero \(.*user_module\.py:1\)"),
        ("raise SystemExit(4)\n", "importing user_module failed: SystemExit: 4"),
        ("def rewards(response): ...\n", "user_module has no 'reward'; its functions are: rewards"),
        ("reward = 3\n", "user_module:reward: is no function but int"),
        ("def reward(completion): ...\n", "user_module:reward needs 'completion'"),
    ],
)
def test_modules_that_do_not_load(project: Callable[[str, str], None], text: str, message: str) -> None:
    project("user_module.py", text)
    with pytest.raises(UserError, match=message):
        load_reward(config("user_module:reward"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exakt", r"'exakt' is neither reasoning_gym, exact, numeric, .* nor a dotted path .*did you mean exact\?"),
        ("tasks.poems.reward", r"after a colon: tasks\.poems:reward"),
        ("tasks/poems.py:reward", r"neither"),
        ("tasks:", r"neither"),
        ("reasoning_gym", r"reasoning_gym scores only prompts of its own generators, but data\.source\.type is jsonl"),
    ],
)
@pytest.mark.parametrize("entry_point", [check_reward, load_reward])
def test_names_that_are_no_paths(function: str, message: str, entry_point: Callable[[ExperimentConfig], Any]) -> None:
    with pytest.raises(UserError, match=r"reward\.function: .*" + message):
        entry_point(config(function))
