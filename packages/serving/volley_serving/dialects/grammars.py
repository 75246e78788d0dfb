"""Grammars of answers that must be JSON or a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from volley_serving.templates.answers import CallForm


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """JSON schema, or grammar in llguidance's Lark syntax, that an answer must match."""

    kind: Literal["json_schema", "lark"]
    text: str


type Tools = Sequence[Mapping[str, Any]]


def calls(tools: Tools, form: CallForm, begun: str) -> list[str]:
    """Return the alternatives of one call: lines of a grammar's rules `call0`, `call1`, …

    Args:
        tools: the functions that may be called, in OpenAI's shape.
        form: with an `end`.
        begun: beginning of every call that the prompt has already.
    """
    lines = list[str]()
    for i, tool in enumerate(tools):
        function = tool["function"]
        text = (form.start + function["name"] + form.between).removeprefix(begun)
        spaces = " " * (len(text) - len(text.rstrip(" ")))
        first = f"{_quoted(text.rstrip(' '))} " if text.strip(" ") else ""
        schema = json.dumps(function.get("parameters") or {"type": "object"}, ensure_ascii=False)
        lines += [
            f"call{i}: {first}{_quoted(spaces) + '? ' if spaces else ''}arguments{i} {_quoted(form.end or '')}",
            f"arguments{i}: %json {schema}",
        ]
    return lines


def answer(schema: Mapping[str, Any] | None, call_lines: Sequence[str], *, thinking: bool) -> AnswerGrammar:
    """Return the grammar of an answer: JSON of the schema, or one of the calls, after the end of opened thoughts."""
    written = json.dumps(schema or {"type": "object"}, ensure_ascii=False, separators=(",", ":"))
    if not call_lines and not thinking:
        return AnswerGrammar("json_schema", written)
    n = sum(line.startswith("call") for line in call_lines)
    choices = [*(["json"] if schema is not None else []), *(f"call{i}" for i in range(n))]
    lines = [f"start: {'thoughts ' if thinking else ''}({' | '.join(choices)})", *call_lines]
    if thinking:
        lines += ["thoughts: thought BLANK", "thought[lazy]: /(.|\\n)*<\\/think>/", "BLANK: /[ \\n]{0,2}/"]
    if schema is not None:
        lines.append(f"json: %json {written}")
    return AnswerGrammar("lark", "\n".join(lines))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
