"""Custom reward service: it receives the episode as JSON and answers a score, or scores by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.env.episode_types import MAX_REWARD, Message, StepResult
from shared.text import well_formed
from volley_sandbox.rewards.servers import Answer, Question

_MAX_SCORES = 32
_MAX_NAME = 40


def question(
    env: str,
    task: str,
    messages: Sequence[Message],
    last: StepResult,
    reward: float,
    expected: str | None,
    version: str,
) -> Question:
    """Make the request to a reward service.

    Args:
        messages: the whole conversation.
        last: the environment's last result.
        reward: sum of its rewards.
    """
    body = {
        "env": env,
        "task": task,
        "messages": [{**message, "content": well_formed(message["content"])} for message in messages],
        "reward": reward,
        "success": last.info.success,
        "expected": expected,
    }
    return Question("", body, _answer, version)


def scores(body: str) -> Mapping[str, float]:
    """Scores by name; a single score has the name ""."""
    return orjson.loads(body)


def _answer(answer: Any) -> Answer:
    """Read `{"score": 0.5}` or `{"scores": {"tone": 0.5, …}}`. Raises ValueError."""
    found = answer if isinstance(answer, dict) else {}
    given = found["scores"] if "scores" in found else {"": found.get("score")}
    if not isinstance(given, dict) or not given or len(given) > _MAX_SCORES:
        raise ValueError(f"scores must be an object of 1 to {_MAX_SCORES} numbers by name")
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or abs(value) > MAX_REWARD or len(name) > _MAX_NAME:
            raise ValueError(
                f'the answer must be {{"score": number}} or {{"scores": {{name: number}}}}: {str(answer)[:200]}'
            )
    return Answer(orjson.dumps({name: float(value) for name, value in given.items()}).decode(), 0)
