"""Requests are refused with the name and value of what is wrong, before they reach the engine."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.api.generate import wants_logprobs
from services.rollout.engines.base import OPTIONS, EngineInfo, GenerateRequest, Grammar
from shared.errors import InputError
from volley_serving.sglang.generate_body import read_prompt

INFO = EngineInfo(512, 256, 4096, 16, (2,), 0.0, 1)


def generate_request(body: dict[str, Any], info: EngineInfo) -> GenerateRequest:
    """Read the body of a request that samples."""
    request = read_prompt(body, info).request
    assert request is not None
    return request


def request(ids: Any = (1, 2), **sampling: Any):
    return generate_request(
        {"input_ids": list(ids) if isinstance(ids, tuple) else ids, "sampling_params": sampling}, INFO
    )


def test_defaults_are_sglangs() -> None:
    wanted = generate_request({"input_ids": np.array([1, 2], np.int32)}, INFO)
    assert wanted.input_ids.dtype == np.int32
    assert (
        wanted.sampling.temperature,
        wanted.sampling.top_p,
        wanted.sampling.top_k,
        wanted.sampling.max_new_tokens,
    ) == (1, 1, -1, 128)
    assert wanted.sampling.sampling_seed is None
    assert wanted.rid != generate_request({"input_ids": [1]}, INFO).rid


def test_the_default_length_fits_the_context() -> None:
    assert generate_request({"input_ids": [1] * 250}, INFO).sampling.max_new_tokens == 5


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input_ids is missing"),
        ({"input_ids": "12"}, "input_ids must be"),
        ({"input_ids": [[1], [2]]}, "list of integers"),
        ({"input_ids": [1, True]}, "list of integers"),
        ({"input_ids": [1.5]}, "list of integers"),
        ({"input_ids": [2**70]}, "64 bits"),
        ({"input_ids": np.array([1.5])}, "integer array"),
        ({"input_ids": [1, 512]}, r"input_ids\[1\] is 512, outside the vocabulary of 512"),
        ({"input_ids": [1], "prompt": "x"}, "unknown field prompt"),
        ({"input_ids": [1], "rid": 5}, "rid"),
        ({"input_ids": [1], "top_logprobs_num": 21}, "top_logprobs_num must be an integer from 0 to 20"),
        ({"input_ids": [1], "top_logprobs_num": 3, "return_logprob": False}, "top_logprobs_num=3 needs return_logprob"),
        ({"input_ids": [1], "token_ids_logprob": [3]}, r"token_ids_logprob=\[3\] is not supported"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params"),
        ({"input_ids": [1, 2], "logprob_start_len": "banana"}, "logprob_start_len must be -1 or a position"),
        ({"input_ids": [1, 2], "logprob_start_len": True}, "logprob_start_len must be"),
        ({"input_ids": [1, 2], "logprob_start_len": 2.0}, "logprob_start_len must be"),
        ({"input_ids": [1, 2], "logprob_start_len": 3}, "logprob_start_len must be"),
        ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states=True is not supported"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path='x' is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [1] * 1025}}, "at most 1024"),
    ],
)
def test_a_wrong_body_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        generate_request(body, INFO)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        (
            {"max_new_tokens": 254},
            "maximum context length is 255 tokens. However, you requested 256 tokens .2 in the messages, 254",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"regex": "a*"}, "regex"),
        ({"stop_token_ids": [600]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"sampling_seed": -1}, "sampling_seed"),
        ({"sampling_seed": 1 << 64}, "sampling_seed"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temprature": 1}, "unknown sampling parameter temprature"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        request(**sampling)


def test_parameters_that_change_nothing_are_accepted() -> None:
    """Clients of SGLang send them all."""
    request(
        min_p=0.0,
        frequency_penalty=0,
        repetition_penalty=1.0,
        n=1,
        stop=None,
        skip_special_tokens=False,
        no_stop_trim=True,
    )


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    neutral = {
        "lora_path": None,
        "return_hidden_states": False,
        "image_data": None,
        "log_metrics": True,
        "return_text_in_logprobs": False,
    }
    for start in (None, -1, 2):
        generate_request({"input_ids": [1, 2], "stream": False, "logprob_start_len": start, **neutral}, INFO)


SCORING: dict[str, Any] = {
    "input_ids": [4, 5, 6],
    "sampling_params": {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
    "return_logprob": True,
}


def test_given_tokens_are_scored_from_the_position_asked_for() -> None:
    for sampling in (None, {}, {"max_new_tokens": None}):
        assert read_prompt({"input_ids": [4], "sampling_params": sampling}, INFO).request is not None
    for start in (0, 1, 2):
        wanted = read_prompt({**SCORING, "logprob_start_len": start, "return_text_in_logprobs": True}, INFO)
        assert (wanted.ids.tolist(), wanted.scored_from, wanted.texts) == ([4, 5, 6], start, True)
        assert wanted.request is None
    assert read_prompt(SCORING, INFO).scored_from == 0
    assert len(read_prompt({**SCORING, "input_ids": [1] * 255}, INFO).ids) == 255


def test_a_prompt_is_scored_beside_its_continuation_if_a_position_is_given() -> None:
    def start(**fields: Any) -> int | None:
        return read_prompt({"input_ids": [4, 5, 6], **fields}, INFO).scored_from

    assert [start(logprob_start_len=at) for at in (None, -1, 3, 0, 2)] == [None, None, None, 0, 2]
    assert start(logprob_start_len=0, return_logprob=False) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 600]}, "outside the vocabulary"),
        (
            {"input_ids": [1] * 256},
            "maximum context length is 255 tokens. However, your messages resulted in 256 tokens",
        ),
        ({"logprob_start_len": 3}, "logprob_start_len must be an integer from 0 to 2"),
        ({"logprob_start_len": -1}, "logprob_start_len must be"),
        ({"return_logprob": None}, "without return_logprob requests nothing"),
        ({"return_text_in_logprobs": 1}, "return_text_in_logprobs must be true or false"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": 0.7}}, "scored at temperature 1"),
        ({"sampling_params": {"max_new_tokens": 0, "regex": "a"}}, "regex"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_routed_experts": True}, "return_routed_experts needs sampled tokens"),
    ],
)
def test_a_wrong_request_for_scores_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_prompt({**SCORING, **changed}, INFO)


def test_log_probabilities_are_asked_for_with_a_boolean() -> None:
    assert [wants_logprobs({"return_logprob": value}) for value in (None, True, False)] == [True, True, False]
    assert wants_logprobs({})
    for value in (7, 0, 1, "true", [], {}):
        with pytest.raises(InputError, match="return_logprob must be true or false"):
            wants_logprobs({"return_logprob": value})


def test_experts_are_asked_for_from_a_position_of_the_prompt() -> None:
    def asked(**fields: Any) -> int | None:
        return generate_request({"input_ids": [1, 2], **fields}, INFO).routed_from

    assert (asked(), asked(return_routed_experts=False, routed_experts_start_len=1)) == (None, None)
    found = [asked(return_routed_experts=True, routed_experts_start_len=start) for start in (None, 0, 2)]
    assert found == [0, 0, 2]
    for wrong in ({"routed_experts_start_len": 3}, {"routed_experts_start_len": -1}, {"return_routed_experts": 1}):
        with pytest.raises(InputError, match=r"^(return_routed_experts|routed_experts_start_len) must be"):
            asked(**wrong)


def test_a_long_wrong_value_is_named_in_short() -> None:
    for body in (
        {"input_ids": [1], "rid": "x" * 10**5},
        {"input_ids": [1], "sampling_params": {"stop_token_ids": ["x"] * 10**5}},
    ):
        with pytest.raises(InputError) as caught:
            generate_request(body, INFO)
        assert len(str(caught.value)) < 300


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert request(temperature=1e-9).sampling.temperature == 0.0


PARAMETERS = st.sampled_from(["top_k", "top_p", "temperature", "max_new_tokens", "stop_token_ids"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PARAMETERS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["input_ids", "sampling_params", "rid", "stream", "x"]), VALUES))
def test_any_body_is_a_request_that_fits_or_one_error(body: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        wanted = generate_request(body, INFO)
        assert len(wanted.input_ids) + wanted.sampling.max_new_tokens <= 255


@given(st.dictionaries(st.sampled_from(["input_ids", "logprob_start_len", "return_text_in_logprobs", "rid"]), VALUES))
def test_any_body_is_a_question_that_fits_or_one_error(changed: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        wanted = read_prompt({**SCORING, **changed}, INFO)
        assert wanted.scored_from is not None
        assert 0 <= wanted.scored_from < len(wanted.ids) <= 255


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"min_p": 0.1, "min_new_tokens": 3}, {"min_p": 0.1, "min_new_tokens": 3}),
        ({"frequency_penalty": 0.5, "presence_penalty": -2}, {"frequency_penalty": 0.5, "presence_penalty": -2.0}),
        ({"logit_bias": {"5": 1, 7: -100.0}}, {"logit_bias": ((5, 1.0), (7, -100.0))}),
        ({"regex": "a*", "json_schema": None}, {"grammar": Grammar("regex", "a*")}),
        ({"json_schema": "{}"}, {"grammar": Grammar("json_schema", "{}")}),
    ],
)
def test_options_of_the_engine_are_honoured(sampling: dict[str, Any], expected: dict[str, Any]) -> None:
    made = generate_request({"input_ids": [1], "sampling_params": sampling}, replace(INFO, options=OPTIONS)).sampling
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 1.1},
        {"min_new_tokens": -1},
        {"frequency_penalty": 3},
        {"logit_bias": {"512": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": [1]},
        {"regex": "a", "json_schema": "{}"},
        {"json_schema": {"type": "object"}},
        {"ebnf": "root ::= a"},
        {"repetition_penalty": 1.2},
    ],
)
def test_a_wrong_option_is_named(sampling: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(sampling))):
        generate_request({"input_ids": [1], "sampling_params": sampling}, replace(INFO, options=OPTIONS))
