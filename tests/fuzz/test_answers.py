"""What other services say, under arbitrary values: a result, or an error of the project, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.errors import DecodeError, InputError, Unavailable, VolleyError, from_problem, problem
from shared.queue import registry
from shared.server_schema import TeacherServer
from tests.fuzz.values import EXAMPLES, JSON, WIRE, as_json, changed
from volley_algorithms.teachers.client import TeacherClient

ANSWERS: dict[str, dict[str, Any]] = {
    "create": {"episode_id": "e", "task": "t", "messages": [{"role": "user", "content": "x"}], "tools": []},
    "step": {
        "messages": [],
        "reward": 1.0,
        "terminated": True,
        "truncated": False,
        "info": {"success": True, "reward_components": {"a": 1.0}, "error": None},
    },
    "num_tasks": {"num_tasks": 5},
    "demonstration": {"messages": [{"role": "user", "content": "x"}]},
    "weights": {"current": "e000001-s000000", "staged": None, "digest": None},
    "score": {
        "meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]], "weight_version": "e000001-s000000"}
    },
    "generate": {
        "output_ids": [5, 6],
        "meta_info": {
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "output_token_logprobs": [-0.5, -0.25],
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": "e000001-s000000", "start": 0, "end": 2}],
        },
    },
}
_ECHO: dict[str, Any] = {"tokens": ["1", "2", "3"], "token_logprobs": [None, -0.5, -0.25]}
ANSWERS |= {
    "scores": {"meta_info": {"input_token_logprobs": [[None, 1, "1"], [-0.5, 2, "2"]]}},
    "echo": {"choices": [{"logprobs": _ECHO}]},
    "prompt_logprobs": {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5, "decoded_token": "2"}}]}]},
}
IDS = np.array([1, 2], np.int32)
CALLS: dict[str, Callable[[httpx.MockTransport], Any]] = {
    "create": lambda t: _with(EnvClient("http://x", transport=t), lambda c: c.create("r", "e", "train", 0, seed=1)),
    "step": lambda t: _with(EnvClient("http://x", transport=t), lambda c: c.step("e", "r", "text")),
    "num_tasks": lambda t: _with(EnvClient("http://x", transport=t), lambda c: c.num_tasks("e", "train")),
    "demonstration": lambda t: _with(EnvClient("http://x", transport=t), lambda c: c.demonstration("e", "train", 0)),
    "weights": lambda t: _with(RolloutClient("http://x", transport=t), lambda c: c.weights()),
    "score": lambda t: _with(RolloutClient("http://x", transport=t), lambda c: c.score(IDS, 1)),
    "generate": lambda t: _with(
        RolloutClient("http://x", transport=t), lambda c: c.generate(IDS, {"max_new_tokens": 4}, "r")
    ),
}
CALLS |= {
    name: lambda t, model=model: _with(
        TeacherClient(TeacherServer(url="http://x", model=model), str, transport=t), _whole_scores
    )
    for name, model in (("scores", None), ("echo", "m"), ("prompt_logprobs", "m"))
}


async def _whole_scores(teacher: TeacherClient) -> None:
    (told,) = (await teacher.logprobs(IDS, 1)).logprobs
    assert np.isfinite(told)
    assert told <= 1e-3


async def _with(client: Any, call: Callable[[Any], Any]) -> Any:
    async with client:
        return await call(client)


@EXAMPLES
@given(
    st.sampled_from(sorted(ANSWERS)).flatmap(
        lambda name: st.tuples(st.just(name), changed(ANSWERS[name], WIRE) | WIRE)
    ),
    st.sampled_from([200, 200, 200, 404]),
)
def test_answers_of_other_services(case: tuple[str, Any], code: int) -> None:
    """A service that answers nonsense is an error of the project to its caller, and no data."""
    name, tree = case
    answer = httpx.Response(code, content=codec.pack(tree), headers={"Content-Type": codec.MEDIA_TYPE})
    with suppress(VolleyError):
        asyncio.run(CALLS[name](httpx.MockTransport(lambda _request: answer)))


@EXAMPLES
@given(st.integers(100, 599), JSON)
def test_problem_bodies(code: int, body: Any) -> None:
    if isinstance(body, dict):
        orjson.dumps(problem(from_problem(code, body)))


SERVER = {"id": "a", "url": "http://x", "version": "e000001-s000000", "capacity": 4, "epoch": 1}


@EXAMPLES
@given(changed(SERVER, JSON).map(as_json) | st.binary(max_size=20))
def test_server_records(record: bytes) -> None:
    server = registry._decode(record)
    assert server is None or server.capacity > 0


def test_an_error_does_not_repeat_its_input_at_length() -> None:
    body = problem(InputError("x" * 10**6, "y" * 10**6))
    assert len(orjson.dumps(body)) < 5000


@pytest.mark.parametrize(
    "ids",
    [[5.5, 6.0], [2**31, 5], [[5, 6]], [[], []], ["5", "6"], [True, False], np.array([2**40, 5]), np.zeros(2, "f4")],
    ids=repr,
)
async def test_output_ids_that_are_none_are_never_data(ids: Any) -> None:
    tree = {**ANSWERS["generate"], "output_ids": ids}
    answer = httpx.Response(200, content=codec.pack(tree), headers={"Content-Type": codec.MEDIA_TYPE})
    with pytest.raises(Unavailable):
        await CALLS["generate"](httpx.MockTransport(lambda _request: answer))


@pytest.mark.parametrize("count", [float("inf"), float("nan"), "1e400", [], None])
async def test_a_count_without_bounds_is_no_count(count: Any) -> None:
    answer = httpx.Response(200, content=codec.pack({"num_tasks": count}), headers={"Content-Type": codec.MEDIA_TYPE})
    with pytest.raises(DecodeError):
        await CALLS["num_tasks"](httpx.MockTransport(lambda _request: answer))
