"""Tokenize the prompt of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from volley_serving.dialects import grammars
from volley_serving.dialects.choices import function_names
from volley_serving.dialects.described import call_form, with_tools_written
from volley_serving.dialects.grammars import AnswerGrammar
from volley_serving.dialects.reading import END_THINK, THINK
from volley_serving.dialects.records import Asked
from volley_serving.templates.prompts import check_variables, render_unfinished

_TAIL = 16  # tokens
_NO_THOUGHTS = f"\n{END_THINK}\n\n"
_THINKING, _EFFORT = "enable_thinking", "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt.

    Attributes:
        opened: text at its end that belongs to the answer (see `AnswerReader`).
        grammar: that the answer must match; None for any text.
    """

    ids: list[int]
    opened: str = ""
    grammar: AnswerGrammar | None = None


def render(asked: Asked, tokenizer: ChatTokenizer) -> Prompt:
    """Tokenize a conversation up to the header of the answer or the last word to continue. Raises InputError."""
    messages, tools = asked.messages, asked.tools
    if variables := variables_of(asked, tokenizer):
        tokenizer = tokenizer.with_variables(variables)
    written = with_tools_written(tokenizer, messages, tools)
    if asked.continues:
        return Prompt(render_unfinished(tokenizer, *written))
    ids = tokenizer.render_prompt(*written, header=asked.header)
    if asked.tool_choice == "required":
        call = begin_call(asked, tokenizer)
        return Prompt([*ids, *call.ids], call.opened, call.grammar)
    opened = ends_open(tokenizer, ids)
    if asked.schema is None:
        return Prompt(ids, opened)
    lines = list[str]()
    if asked.reads_calls:
        function_names(tools)
        form = call_form(tokenizer, messages, tools)
        if form.end is None:
            raise InputError(
                "the chat template writes calls that no grammar can describe beside a format of the answer"
            )
        lines = grammars.calls(tools, form, "")
    return Prompt(ids, opened, grammars.answer(asked.schema, lines, thinking=bool(opened)))


def begin_call(asked: Asked, tokenizer: ChatTokenizer) -> Prompt:
    """Tokenize the beginning of a required call, with its name if there is only one function to call.

    It follows the header of the answer. Raises InputError if the chat template writes no calls.
    """
    name, tools, form = asked.tool_name, asked.tools, call_form(tokenizer, asked.messages, asked.tools)
    if name is not None:
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
    text = (form.start if name is None else form.start + name + form.between).rstrip(" ")
    grammar = None
    if form.end is not None:
        grammar = grammars.answer(None, grammars.calls(tools, form, text), thinking=False)
    if form.opened.strip() == THINK:
        return Prompt(tokenizer.encode(_NO_THOUGHTS + text), THINK + _NO_THOUGHTS + text, grammar)
    return Prompt(tokenizer.encode(text), text, grammar)


def ends_open(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the <think> that a prompt has opened for the answer; empty if it has not."""
    return THINK if tokenizer.decode(ids[-_TAIL:]).rstrip().endswith(THINK) else ""


def variables_of(asked: Asked, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the variables for the chat template. Raises InputError naming one that it does not read.

    A template without `enable_thinking` is not asked to think, or not to.
    """
    check_variables(tokenizer, asked.variables)
    variables = dict[str, Any]()
    if asked.thinking is not None and _THINKING in tokenizer.templates.names:
        variables[_THINKING] = asked.thinking
    if _EFFORT in tokenizer.templates.names:
        variables |= {_EFFORT: asked.effort} if asked.effort else {}
    elif asked.effort not in (None, "none", "medium"):
        raise InputError(
            f"{_EFFORT}={asked.effort!r} is not supported", "leave it out: the model's chat template does not read it"
        )
    return {**variables, **asked.variables}
