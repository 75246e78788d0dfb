"""Read SGLang's `sampling_params`: those of the core, and constraints that an engine may have (`EngineInfo.options`).

Parameters of SGLang's clients that Volley does not implement pass if their value has no effect (NEUTRAL); any other is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.rollout.api import validation
from services.rollout.api.validation import MAX_NEW_TOKENS, integer, number, short
from services.rollout.engines.base import EngineInfo, Grammar, GrammarKind, SamplingParams
from shared.bounds import is_one_of
from shared.errors import InputError
from volley_serving.sglang.names import check_names

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "stop_regex": (None, [], ""),
    "spaces_between_special_tokens": (True, False, None),
    "custom_params": (None, {}),
    "beam_width": (1, None),
    "watermark": (None,),
}
"""Sampling parameters of SGLang, with the values that ask for nothing; others are refused."""
OF_ANSWERS = frozenset({"stop", "n", "skip_special_tokens", "no_stop_trim", "stream_interval"})
SAMPLING = validation.SAMPLING | OF_ANSWERS
"""Sampling parameters that are honoured."""
OPTIONAL: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "min_p": ("min_p", (0, None)),
    "min_new_tokens": ("min_new_tokens", (0, None)),
    "frequency_penalty": ("frequency_penalty", (0, None)),
    "presence_penalty": ("presence_penalty", (0, None)),
    "logit_bias": ("logit_bias", (None, {})),
    "json_schema": ("grammar", (None, "")),
    "regex": ("grammar", (None, "")),
    "lark": ("grammar", (None, "")),
}
"""Sampling parameters that are honoured if the engine has an option (`EngineInfo.options`): the option, and the values
that ask for nothing.
"""
MAX_PENALTY, MAX_BIAS, MAX_BIASES = 2.0, 100.0, 1024


def read(raw: Any, info: EngineInfo, n_prompt: int) -> SamplingParams:
    """Read `sampling_params` for a prompt of so many tokens; refuse those that the engine would ignore.

    Raises InputError.
    """
    if not isinstance(raw, Mapping):
        return validation.sampling_params(raw, info, n_prompt)
    missing = {name: neutral for name, (option, neutral) in OPTIONAL.items() if option not in info.options}
    check_names(raw, SAMPLING | (OPTIONAL.keys() - missing), {**NEUTRAL, **missing}, "sampling parameter ")
    return replace(
        validation.sampling_params(raw, info, n_prompt),
        min_p=number("min_p", raw.get("min_p"), 0.0, 0.0, 1.0),
        min_new_tokens=integer("min_new_tokens", raw.get("min_new_tokens"), 0, 0, MAX_NEW_TOKENS),
        frequency_penalty=number("frequency_penalty", raw.get("frequency_penalty"), 0.0, -MAX_PENALTY, MAX_PENALTY),
        presence_penalty=number("presence_penalty", raw.get("presence_penalty"), 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_biases(raw.get("logit_bias"), info.vocab_size),
        grammar=_grammar(raw),
    )


def _biases(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`, an object from token ids to numbers."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise InputError(f"logit_bias must be an object of at most {MAX_BIASES} token ids, not {short(value)}")
    for token in value:
        if not (str(token).isascii() and str(token).isdigit() and int(token) < vocab_size):
            raise InputError(f"logit_bias has {short(token)}, which is not a token id below {vocab_size}")
    return tuple(
        (int(token), number(f"logit_bias[{token}]", bias, 0.0, -MAX_BIAS, MAX_BIAS)) for token, bias in value.items()
    )


def _grammar(raw: Mapping[str, Any]) -> Grammar | None:
    """Read `json_schema`, `regex` or `lark`, of which a request may have one; all are texts."""
    kinds: tuple[GrammarKind, ...] = ("json_schema", "regex", "lark")
    given = [kind for kind in kinds if not is_one_of(raw.get(kind), (None, ""))]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} are both given", "send one of them")
    for kind in given:
        if not isinstance(raw[kind], str):
            raise InputError(f"{kind} must be a text, not {short(raw[kind])}", "send a JSON schema as text, too")
        return Grammar(kind, raw[kind])
    return None
