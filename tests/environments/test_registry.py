"""From the section `environment` to an environment, and everything that can be wrong with it."""

import sys

import pytest

from laminar.config.environment_schema import EnvironmentConfig
from laminar.environments.environment import EnvironmentPrompt
from laminar.environments.registry import check_environment, load_environment, stop_texts
from laminar.errors import UserError

GAME = """
from laminar.environments.environment import Step

class Game:
    def __init__(self, *, word, tries=3, score=None, sandbox=None):
        self.word, self.tries, self.score, self.sandbox = word, tries, score, sandbox
    async def reset(self, prompt): return "guess"
    async def step(self, response): return Step(done=response == self.word)
    async def close(self): pass

class Half:
    def reset(self, prompt): pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_games", None)


async def score(prompt, response):
    return 0.5


def config(name, **more):
    return EnvironmentConfig(name=name, **more)


def test_built_in_environments_are_made_with_their_params_and_limits():
    made = load_environment(config("python_tool", params={"code_start": "<py>"}, sandbox={"time_s": 2.0}), score)()
    assert (made._code_start, made._sandbox.time_s) == ("<py>", 2.0)
    check_environment(config("reasoning_gym_retry", params={"feedback": "No."}))


async def test_a_class_of_the_users_own_gets_what_it_asks_for(project):
    section = config("my_games:Game", params={"word": "yes"})
    check_environment(section)
    make = load_environment(section, score)
    first, second = make(), make()
    assert first is not second
    assert (first.word, first.tries) == ("yes", 3)
    prompt = EnvironmentPrompt(text="", answer="", metadata={}, source="")
    assert await first.score(prompt, "") == 0.5
    assert first.sandbox.time_s == 5.0


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("python_tol", {}, "did you mean python_tool?"),
        ("no_such.module:Game", {}, "there is no package no_such"),
        ("no_such_module:Game", {}, "there is no module no_such_module"),
        ("my_games:Gane", {}, "its classes are: Game"),
        ("python_tool", {"params": {"code_strat": "x"}}, "did you mean code_start?"),
        ("single_turn", {"params": {"x": 1}}, "environment.params: set, but environment.name is single_turn"),
        ("single_turn", {"stop": ["x"]}, "environment.stop: set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(project, name, more, said):
    with pytest.raises(UserError, match=said):
        check_environment(config(name, **more))
    assert "my_games" not in sys.modules


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("my_games:Half", {}, "has no method 'step'"),
        ("my_games:Game", {}, "needs 'word'"),
        ("my_games:Game", {"word": "a", "wrod": "b"}, "environment.params.wrod"),
        ("my_games:Step", {"observation": "x"}, "has no method 'reset'"),
    ],
)
def test_a_class_that_does_not_fit_is_named(project, name, params, said):
    with pytest.raises(UserError, match=said):
        load_environment(config(name, params=params), score)


def test_an_import_that_fails_is_named(project):
    (project / "my_games.py").write_text("class Game: pass\nraise SystemExit(3)")
    with pytest.raises(UserError, match="importing my_games failed: SystemExit"):
        load_environment(config("my_games:Game"), score)


def test_stop_texts():
    assert list(stop_texts(config("python_tool"))) == ["</code>"]
    assert list(stop_texts(config("python_tool", params={"code_end": "$"}))) == ["$"]
    assert list(stop_texts(config("python_tool", stop=["a", "b"]))) == ["a", "b"]
    assert list(stop_texts(config("reasoning_gym_retry"))) == []
