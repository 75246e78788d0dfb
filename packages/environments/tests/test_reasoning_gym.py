"""The environment `reasoning_gym` against the package itself, imported here as anybody would."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.env.environments.tagged_answers import tagged_answer
from services.env.episode_types import assistant
from shared.errors import InputError, NotFound, RateLimited
from volley.layout import PROJECT
from volley_environments.reasoning import library
from volley_environments.reasoning.reasoning_gym import DatasetQuestion, ReasoningGym, ReasoningGymConfig

reasoning_gym = library.reasoning_gym
WITHOUT_AN_ANSWER = {"boxnet", "rush_hour"}
SINGLE = [name for name in library.names() if name != "composite"]
QUICK = SINGLE[:: len(SINGLE) // 5]

UPSTREAM = """
import json, random, sys
from volley_environments.reasoning import library as reasoning_gym_library
import reasoning_gym
for name, seed, answers in json.load(sys.stdin):
    random.seed(seed)
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=1)
    item = dataset[0]
    scores = []
    for answer in answers:
        try:
            scores.append(dataset.score_answer(answer, item))
        except Exception:
            scores.append(0.0)
    print("\\nSCORED", json.dumps([item["question"], scores]))
"""
"""What upstream asks and scores, in a process that sets Python's hash seed: some datasets iterate over sets. The first
import stands in for pycosat.
"""


def upstream(asked: Sequence[tuple[str, int, Sequence[str]]]) -> list[tuple[str, list[float]]]:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UPSTREAM],
        input=json.dumps(asked),
        capture_output=True,
        encoding="utf-8",
        timeout=1200,
        env={"PYTHONHASHSEED": "0", "PYTHONPATH": str(PROJECT)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.removeprefix("SCORED ") for line in ran.stdout.splitlines() if line.startswith("SCORED ")]
    return [json.loads(line) for line in lines]


def perturbed(answer: str, dice: random.Random) -> list[str]:
    """The answer, near misses, and what a model says that has not understood."""
    where = dice.randrange(len(answer)) if answer else 0
    near = [answer[:where] + answer[where + 1 :], answer + " ", answer + "1", answer.upper(), f"the answer is {answer}"]
    return [answer, *near, "", "0", "42", "yes", "I do not know", "[1, 2]", "((", "1 + 2"]


def patiently[T](ask: Callable[[], T]) -> T:
    """As a client asks: some questions take a second to make, and a call that has drawn for long leaves the rest to the
    next.
    """
    for _ in range(100):
        try:
            return ask()
        except RateLimited:
            continue
    raise AssertionError("a hundred calls were not enough")


def asked_and_scored(name: str, index: int) -> tuple[tuple[str, int, list[str]], tuple[str, list[float]]]:
    env = ReasoningGym(ReasoningGymConfig(dataset=name))
    question = patiently(lambda: env.question(("train", "eval")[index % 2], index))
    answers = perturbed(question.answer or "", random.Random(f"{name}{index}"))
    return (name, question.seed, answers), (question.text, [score(env, question, answer) for answer in answers])


def score(env: ReasoningGym, question: DatasetQuestion, answer: str) -> float:
    return env.score(question, answer)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("names", "per_dataset"),
    [pytest.param(QUICK, 1, id="five"), pytest.param(SINGLE, 2, id="all", marks=pytest.mark.long)],
)
def test_questions_and_scores_are_upstreams(names: list[str], per_dataset: int) -> None:
    """At length: two tasks of every dataset, 210 tasks and 14 answers to each."""
    pairs = [asked_and_scored(name, index) for name in names for index in range(per_dataset)]
    theirs = upstream([asked for asked, _ in pairs])
    assert len(theirs) == len(names) * per_dataset >= 5
    for ((name, seed, answers), (text, scores)), (their_text, their_scores) in zip(pairs, theirs, strict=True):
        assert text == their_text, (name, seed)
        for answer, ours, other in zip(answers, scores, their_scores, strict=True):
            assert ours == pytest.approx(other), (name, seed, answer)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_dataset_has_a_demonstration_that_its_scorer_takes() -> None:
    missing, short = set(), set()
    for name in SINGLE:
        try:
            env = ReasoningGym(ReasoningGymConfig(dataset=name))
            shown = patiently(lambda env=env: env.demonstration("train", 0))
        except NotFound:
            missing.add(name)
        else:
            short |= set() if shown.success else {name}
    assert missing == WITHOUT_AN_ANSWER
    assert not short


def test_only_the_modules_that_are_guarded_evaluate_answers() -> None:
    """Who calls `eval` or `parse_expr` on something named answer, by the source of the installed package."""
    root = Path(str(reasoning_gym.__file__)).parent
    evaluators, parsers = {"eval", "exec"}, {"parse_expr", "sympify", "parse_latex", "S", "simplify"}
    lists, expressions = set(), set()
    for path in root.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(source)) if "answer" in source else ()
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name not in evaluators | parsers or not call.args:
                continue
            if ast.unparse(call.args[0]) in ("answer", "answer.strip()", "user_answer"):
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                lists |= {module} if name in evaluators else set()
                expressions |= {path.stem} if name in parsers else set()
    expressions.discard("propositional_logic")  # has a parse_expr of its own
    assert lists == set(library.READS_LISTS)
    assert expressions == library.PARSES_EXPRESSIONS


HOSTILE = [
    "__import__('os').system('touch {path}')",
    "exec(chr(111)+chr(115))",
    "open('{path}', 'w')",
    "().__class__.__bases__[0].__subclasses__()",
    "[open('{path}', 'w')]",
    "[x for x in [open('{path}', 'w')]]",
    "S('open(1)')",
    "sympify(latex(x))",
    "x.subs",
    "lambda: 1",
]


@pytest.mark.parametrize(
    "name", ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication", "n_queens"]
)
def test_what_a_model_writes_is_never_run(name: str, tmp_path: Path) -> None:
    env, pwned = ReasoningGym(ReasoningGymConfig(dataset=name)), tmp_path / "pwned"
    episode = env.question("train", 0)
    for text in HOSTILE:
        assert env.score(episode, text.replace("{path}", str(pwned))) < 0.1
    assert not pwned.exists()


def test_an_answer_that_takes_for_ever_costs_its_own_episode() -> None:
    env = ReasoningGym(ReasoningGymConfig(dataset="countdown"))
    result = env.reset("train", 0, 0).step(assistant("<answer>9**9**9**9**9</answer>"))
    assert (result.reward, result.info.success, result.terminated) == (0.0, False, True)
    assert "limits" in result.info.extra["grading"]
    assert env.demonstration("train", 0).success


def test_the_mathematics_of_an_answer_is_plain() -> None:
    for text in ("X**4 + 10*X**3 + C", "-3*X*sin(X) + exp(2*x)", "(1 + 2) * 3 - .5", "1.5e3", "log(x)/2", "5."):
        assert library.is_plain(text), text
    for text in ("x.y", "x . real", "eval(1)", "a[0]", "x__y", "'a'", "x;y", "f'{x}'", "open(x)", "1" * 3000, "é"):
        assert not library.is_plain(text), text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset": "nowhere"}, "no dataset 'nowhere' .*chain_sum"),
        ({"dataset_config": {"colour": 1}}, "rejects dataset_config=.*colour"),
        ({"dataset_config": {"min_terms": -1}}, "rejects dataset_config=.*min_terms"),
        ({"dataset": "coin_flip", "eval_tasks": 1, "dataset_config": {"seeds": 3}}, "rejects"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ReasoningGym(ReasoningGymConfig(**config)).task("train", 0)


def test_the_seed_is_not_a_setting() -> None:
    with pytest.raises(ValueError, match=r"seed.*split and index"):
        ReasoningGymConfig(dataset_config={"seed": 1})


def test_a_mixture_is_a_dataset_too() -> None:
    parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "leg_counting", "weight": 1, "config": {}}]
    env = ReasoningGym(ReasoningGymConfig(dataset="composite", dataset_config={"datasets": parts}))
    assert all(env.demonstration("train", index).success for index in range(4))


@pytest.mark.parametrize(
    "text",
    [
        "<answer>5</answer>",
        "<answer> 5\n</answer> <answer>6</answer>",
        "5",
        "<answer>5",
        "<answer></answer>",
        "a</answer>",
    ],
)
def test_the_answer_is_read_where_upstream_reads_it(text: str) -> None:
    theirs = reasoning_gym.utils.extract_answer(text)
    ours = tagged_answer(text)
    assert (ours and ours.strip()) == theirs
    assert not re.search(r"<answer>", ours or "")
