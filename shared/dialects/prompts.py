"""Tokenize the prompt of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.dialects.reading import THINK
from shared.dialects.records import Asked
from shared.errors import InputError
from shared.models.chat import ChatTokenizer

_TAIL = 16  # tokens
_THINKING, _EFFORT = "enable_thinking", "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt. `opened`: text at its end that belongs to the answer (see `AnswerReader`)."""

    ids: list[int]
    opened: str = ""


def render(asked: Asked, tokenizer: ChatTokenizer) -> Prompt:
    """Tokenize a conversation up to the header of the answer or the last word to continue. Raises InputError."""
    messages, tools = asked.messages, asked.tools
    if variables := variables_of(asked, tokenizer):
        tokenizer = tokenizer.with_variables(variables)
    if tokenizer.leaves_out(messages, tools):
        raise InputError(
            "tools: the model's chat template does not write tools into the prompt",
            "describe them in a system message, or serve a model whose template knows tools",
        )
    if asked.continues:
        return Prompt(tokenizer.render_unfinished(messages, tools))
    if asked.tool_choice == "required":
        return Prompt(*tokenizer.render_call(messages, tools, asked.tool_name))
    ids = tokenizer.render_prompt(messages, tools, header=asked.header)
    return Prompt(ids, ends_open(tokenizer, ids))


def ends_open(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the <think> that a prompt has opened for the answer; empty if it has not."""
    return THINK if tokenizer.decode(ids[-_TAIL:]).rstrip().endswith(THINK) else ""


def variables_of(asked: Asked, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the variables for the chat template. Raises InputError naming one that it does not read.

    A template without `enable_thinking` is not asked to think, or not to.
    """
    tokenizer.check_variables(asked.variables)
    variables = dict[str, Any]()
    if asked.thinking is not None and tokenizer.reads_variable(_THINKING):
        variables[_THINKING] = asked.thinking
    if tokenizer.reads_variable(_EFFORT):
        variables |= {_EFFORT: asked.effort} if asked.effort else {}
    elif asked.effort not in (None, "none", "medium"):
        raise InputError(
            f"{_EFFORT}={asked.effort!r} is not supported", "leave it out: the model's chat template does not read it"
        )
    return {**variables, **asked.variables}
