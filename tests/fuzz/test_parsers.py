"""What clients and operators write, under arbitrary values: a result, or an error of the project, and nothing else."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st

from services.env.api import answers, schemas
from services.env.catalogue import Catalogue
from services.env.environments.kinds import kinds
from services.env.episode_types import assistant
from services.orchestrator.mixture.members import offers_in
from services.rollout.engines.base import EngineInfo
from shared import codec, config
from shared.errors import ConfigError, DecodeError, InputError, VolleyError
from shared.run import mixture
from shared.services_schema import Limits
from shared.types import WeightVersion
from shared.web.http import create_app
from tests.env.test_catalogue import RUNNER, register
from tests.fuzz.values import CASES, EXAMPLES, JSON, KEYS, TEXTS, WIRE, changed
from tests.support.tokenizer import FOLDER
from volley_environments.gsm8k.data import Problem
from volley_environments.gsm8k.environment import Gsm8kConfig, Gsm8kEpisode
from volley_sandbox.api.schemas import RegisterBody
from volley_serving.sglang import generate_body
from volley_serving.sglang.sampling import NEUTRAL

INFO = EngineInfo(512, 256, 4096, 16, (2,), 0.0, 1)
PROBLEM = Problem("?", "#### 4", "4")

GENERATE = {
    "input_ids": [5, 6],
    "sampling_params": {
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 4,
        "stop_token_ids": [2],
        "min_p": 0,
        "stop": [],
    },
    "rid": "a",
    "stream": False,
    "top_logprobs_num": 0,
}


@EXAMPLES
@given(changed(GENERATE, WIRE) | st.dictionaries(KEYS, WIRE, max_size=4))
def test_generate_bodies(body: dict[Any, Any]) -> None:
    with suppress(InputError):
        for one in generate_body.read(body, INFO, None).prompts:
            assert one.ids.dtype == np.int32
            assert one.ids.size + (one.request.sampling.max_new_tokens if one.request else 0) < INFO.context_length
            assert one.ids.min() >= 0
            assert one.ids.max() < INFO.vocab_size


@pytest.mark.parametrize("value", [np.zeros(0), np.zeros(1), np.zeros(2), b"", float("nan"), {"a": 1}, [0]], ids=repr)
@pytest.mark.parametrize(
    "name", ["stream", "top_logprobs_num", *NEUTRAL, "ignore_eos", "top_p", "max_new_tokens", "sampling_seed"]
)
def test_values_of_the_wrong_type_are_refused(name: str, value: Any) -> None:
    inside = name not in ("stream", "top_logprobs_num")
    body = {"input_ids": [5]} | ({"sampling_params": {name: value}} if inside else {name: value})
    with pytest.raises(InputError, match=name):
        generate_body.read(body, INFO, None)


CREATE = {"request_id": "r", "env": "frozen_lake", "split": "train", "index": 0, "seed": 5}
CALL = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
STEP = {"request_id": "r", "message": {"role": "assistant", "content": "<answer>Up</answer>", "tool_calls": [CALL]}}
REGISTER = {"name": "v", "base": "gsm8k", "config": {"tool": "calculator", "max_turns": 3}}
BODIES: list[tuple[type[schemas.Body], dict[str, Any]]] = [
    (schemas.CreateBody, CREATE),
    (schemas.StepBody, STEP),
    (RegisterBody, REGISTER),
]


APP = create_app("env", limits=Limits(), tokens=None, ready=lambda: None)


async def _read(model: type[schemas.Body], content: bytes, media: str) -> schemas.Body:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(b"content-type", media.encode())],
        "query_string": b"",
        "app": APP,
    }
    return await schemas.read(Request(scope, receive), model)


@EXAMPLES
@given(
    st.sampled_from(BODIES).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), changed(pair[1], WIRE) | st.dictionaries(KEYS, WIRE))
    )
)
def test_environment_bodies(case: tuple[type[schemas.Body], dict[Any, Any]]) -> None:
    model, tree = case
    with suppress(InputError):
        body = asyncio.run(_read(model, codec.pack(tree), codec.MEDIA_TYPE))
        if isinstance(body, schemas.StepBody):
            episode = Gsm8kEpisode(PROBLEM, Gsm8kConfig(tool="calculator"))
            orjson.dumps(answers.stepped(episode.step(body.message.as_message())))


@EXAMPLES
@given(st.binary(max_size=60), st.sampled_from(["application/json", codec.MEDIA_TYPE]))
def test_environment_bodies_that_are_none(content: bytes, media: str) -> None:
    with suppress(InputError):
        asyncio.run(_read(schemas.CreateBody, content, media))


@EXAMPLES
@given(st.text(max_size=300), JSON)
def test_steps_of_a_tool_environment_are_total(text: str, calls: Any) -> None:
    """Whatever a model says is data."""
    episode = Gsm8kEpisode(PROBLEM, Gsm8kConfig(tool="calculator"))
    said = f"<tool_call>{text}</tool_call>" if len(text) % 2 else text
    orjson.dumps(answers.stepped(episode.step(assistant(said))))
    if isinstance(calls, list):
        orjson.dumps(answers.stepped(episode.step({"role": "assistant", "content": "", "tool_calls": calls})))


CONFIGS = {
    kind: {name: field.default for name, field in kinds()[kind].config.model_fields.items()}
    for kind in ("frozen_lake", "sokoban", "blocksworld", "tetris")
}


@EXAMPLES
@given(st.sampled_from(sorted(CONFIGS)).flatmap(lambda kind: st.tuples(st.just(kind), changed(CONFIGS[kind], JSON))))
def test_variants_have_bounded_rewards(case: tuple[str, dict[str, Any]]) -> None:
    kind, changes = case
    with suppress(VolleyError):
        entry, _ = register(Catalogue(RUNNER), "v", kind, changes)
        described = json.loads(orjson.dumps(entry.describe()))["config"]
        assert all(abs(value) <= 2**31 for value in described.values() if isinstance(value, int | float))


TREE = yaml.safe_load((FOLDER.parents[1] / "quickstart.yaml").read_text(encoding="utf-8"))
OVERRIDES = st.builds(
    lambda key, sign, value: f"{key}{sign}{value}",
    st.sampled_from(["run.name", "trainer", "a.b", "", "data[0]", ".", "x"]) | TEXTS,
    st.sampled_from(["=", "", "==", "=[", "={", "=${", "=!!python/object:"]),
    TEXTS,
)


@settings(EXAMPLES, max_examples=CASES // 10)
@given(changed(TREE, JSON), st.lists(OVERRIDES, max_size=2))
def test_configurations(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any], overrides: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with suppress(ConfigError):
        config.load([path], overrides).to_yaml()


ODD_YAML = [
    b"\xff\xfe",
    b"a: 2020-13-45",
    b"? [1]\n: 2",
    b"1: 2",
    b"a: &a [*a]",
    b"!!python/object:os.system {}",
    b"a: ${b}",
    b"[" * 3000,
    b"\0",
    b"- 1",
]


@settings(EXAMPLES, max_examples=CASES // 10)
@given(
    st.binary(max_size=40)
    | st.sampled_from([*ODD_YAML, b"run: " + b"{a: " * 500, b"run: {name: 0x1F, seed: 1_0}", b"run: {<<: 5}"])
)
def test_configuration_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_bytes(data)
    with suppress(ConfigError):
        config.load([path])


@EXAMPLES
@given(st.text(max_size=30) | st.from_regex(r"e\d{5,8}-s\d{5,8}"))
def test_weight_versions(text: str) -> None:
    with suppress(DecodeError):
        assert str(WeightVersion.parse(text)) == text


MIXTURE = {
    "from_ticket": 3,
    "weights": {"a": 1, "b@2": 3},
    "first": ["b@2"],
    "sizes": {"b@2": [5, 0]},
    "chosen": {"a": 1.5},
    "suspended": {"c@1": "failed"},
    "why": "b@2 joined",
    "at": 1.0,
}
ROW = {"name": "adder@1", "state": "active", "weight": 1, "version": 1}


@EXAMPLES
@given(changed(MIXTURE, JSON) | JSON)
def test_lines_of_a_mixture(line: Any) -> None:
    with suppress(DecodeError):
        change = mixture.parse(json.dumps(line).encode())
        assert mixture.parse(change.encode()) == change
        assignment = mixture.TicketAssignment({"a": 1})
        assignment.add(change)
        assert assignment.of(change.from_ticket).ordinal >= 1


@EXAMPLES
@given(changed(ROW, WIRE) | WIRE)
def test_rows_of_environments(row: Any) -> None:
    with suppress(DecodeError):
        for offer in offers_in({"environments": [row]}).values():
            assert offer.weight >= 0
