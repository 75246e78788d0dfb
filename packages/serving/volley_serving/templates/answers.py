"""Assistant's turns as the chat template writes them: end of the prompt, and text of the turn.

The text of a turn is the text that the template adds to the prompt for the message. Templates deviate in two ways: the
generation prompt may open a block that the template does not repeat (`<think>`, DeepSeek-R1), and the template may drop
the reasoning in the content of a message. Then the content, with its reasoning, is used as given, after the opened
block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.models.messages import REASONING, arguments_of, call_of
from shared.models.templates import Messages, Tools
from shared.models.turns import MARKER, QUESTION, common_length, probe, rest_after
from volley_serving.templates.blocks import Spans, render_marked

_THOUGHT = "</think>"
_CONTEXT = 64  # characters


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """One turn of the assistant.

    Attributes:
        prompt: text before the turn.
        said: text of the turn; may continue after the turn's end token.
        whole: text that the template writes for both.
        opened: end of the generation prompt that `prompt` lacks, because the template leaves it out before this answer.
        spans: parts of `said` in `{% generation %}` blocks.
    """

    prompt: str
    said: str
    whole: str
    opened: str = ""
    spans: Spans | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """Text of a call as a chat template writes it: `start`, the name, `between`, the arguments as JSON, `end`.

    `end` is None if the template writes arguments otherwise; `between` then ends before them. The template leaves out
    `opened`, the end of the prompt, before a call.
    """

    opened: str
    start: str
    between: str
    end: str | None


class AnswerRenderer:
    """Renderer of assistant's turns with the chat templates of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._templates, self._turns = tokenizer.templates, tokenizer.turns

    def call_form(self, before: Messages, tools: Tools) -> CallForm:
        """Find the form of a call at the beginning of the next turn. Raises InputError if the template writes none."""
        name, key = probe(0), probe("key")
        function = {"name": name, "arguments": {key: "1"}}
        call = {"id": "call00000", "type": "function", "function": function}
        turn = self.turn(before, {"role": "assistant", "content": "", "tool_calls": [call]}, tools)
        start, _, rest = turn.said.partition(name)
        at = rest.rfind("{", 0, rest.find(key))
        try:
            arguments, end = json.JSONDecoder().raw_decode(rest, at) if at >= 0 else (None, 0)
        except ValueError:
            arguments, end = None, 0
        if arguments == {key: "1"} and rest.endswith(self._turns.closing):
            return CallForm(turn.opened, start, rest[:at], rest[end:].removesuffix(self._turns.closing))
        between = rest[: rest.find(key)].rstrip("{<[=\n\"' ").removesuffix("<parameter").rstrip("\n")
        return CallForm(turn.opened, start, between, None)

    def turn(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> RenderedTurn:
        """Render the turn of `message` after `before`. Raises InputError naming a part that is left out."""
        turn = self._added(before, message, tools)
        context = before if turn else [QUESTION]
        turn = turn or self._alone(before, message, tools)
        content, whole = message.get("content") or "", _squeezed(turn.prompt[-_CONTEXT:] + turn.opened + turn.said)
        calls = message.get("tool_calls") or []
        for key in REASONING:
            value = message.get(key)
            if value and (
                _squeezed(value) not in whole
                or self._drops(context, message, tools, [one for one in REASONING if message.get(one) == value])
            ):
                raise InputError(
                    f"the chat template leaves out {key}", "write it into content, as the model is to say it"
                )
        self._check_calls(context, message, tools)
        if calls and content and self._drops(context, message, tools, ["content"]):
            raise InputError(
                "the chat template leaves out content beside tool_calls",
                "leave content empty there, or write the calls into it",
            )
        legacy = message.get("function_call")
        if legacy and not _repeats(legacy, calls) and self._drops(context, message, tools, ["function_call"]):
            raise InputError("the chat template leaves out function_call", "write it as tool_calls")
        if _squeezed(content) in whole and not _opens(content, turn.opened):
            return turn
        answer = content.rpartition(_THOUGHT)[2]
        if _THOUGHT not in content or calls or not self._turns.writes_content or _squeezed(answer) not in whole:
            raise InputError(
                "the chat template leaves out content of the assistant", "use a template that writes it whole"
            )
        return self._verbatim(turn, content)

    def _check_calls(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> None:
        """Check that the template writes calls and arguments. Raises InputError naming one that it leaves out."""
        calls = message.get("tool_calls") or []
        if not calls:
            return
        probed = {**message, "tool_calls": [_probed_call(call, i) for i, call in enumerate(calls)]}
        try:
            text = self._templates.render([*before, probed], tools, prompt=False).lower()
        except InputError:  # the template reads names or arguments
            return
        for i, call in enumerate(calls):
            inner = call_of(call)
            if probe(i) not in text:
                raise InputError(
                    f"the chat template leaves out the call of {inner['name']}: it knows no tool_calls",
                    "write calls into content, in the format that the model is to use",
                )
            written = arguments_of(probed["tool_calls"][i])
            for (key, value), (word, other) in zip(arguments_of(call).items(), written.items(), strict=True):
                if word not in text or (other != value and other not in text):
                    raise InputError(f"the chat template leaves out the argument {key} of the call of {inner['name']}")

    def _drops(self, before: Messages, message: Mapping[str, Any], tools: Tools, keys: Sequence[str]) -> bool:
        """True if the template writes the same text without these keys of a message."""
        without = {key: one for key, one in message.items() if key not in keys}
        try:
            texts = [
                self._templates.render([*before, {"content": "", **one}], tools, prompt=False)
                for one in (message, without)
            ]
        except InputError:
            return False
        return texts[0] == texts[1]

    def _verbatim(self, turn: RenderedTurn, content: str) -> RenderedTurn:
        """Make the turn with its content as given, because the template drops the reasoning in it."""
        said = content
        if _opens(content, turn.opened):
            said = content.lstrip().removeprefix(turn.opened.strip())
            said = said.lstrip("\n") if turn.opened.endswith("\n") else said
        return RenderedTurn(turn.prompt + turn.opened, said + self._turns.closing, turn.whole)

    def _alone(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> RenderedTurn:
        """Render the turn after a question, because the template edits the real conversation. Raises InputError."""
        turn = self._added([QUESTION], message, tools)
        if turn is None:
            raise InputError(
                "the chat template edits the conversation when the assistant's message is added",
                "the end of the prompt and the beginning of the answer cannot be told apart",
            )
        return replace(turn, prompt=self._templates.render(before, tools).removesuffix(turn.opened))

    def _added(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> RenderedTurn | None:
        """Render the text that `message` adds to the prompt; None if the text before it changes."""
        prompt = self._templates.render(before, tools)
        whole, spans = render_marked(self._templates, [*before, message], tools)
        if whole.startswith(prompt):
            return RenderedTurn(prompt, whole[len(prompt) :], whole, spans=_from(spans, len(prompt)))
        said = {"role": "assistant", "content": MARKER}
        plain = self._templates.render([*before, said], tools, prompt=False).partition(MARKER)[0]
        if rest_after(prompt, plain) is None:
            return None
        base, n = self._templates.render(before, tools, prompt=False), common_length(_common_text(prompt, plain), whole)
        if n < len(plain) and not (n > len(base) and whole.startswith(base)):
            return None
        return RenderedTurn(whole[:n], whole[n:], whole, opened=prompt[n:], spans=_from(spans, n))


def _common_text(one: str, other: str) -> str:
    return one[: common_length(one, other)]


def _from(spans: Spans | None, start: int) -> Spans | None:
    if spans is None:
        return None
    return tuple((max(begin - start, 0), end - start) for begin, end in spans if end > start)


def _opens(content: str, opened: str) -> bool:
    """True if the content continues the block that the prompt has opened."""
    if not opened.strip():
        return False
    return content.lstrip().startswith(opened.strip()) or (opened.strip() == "<think>" and _THOUGHT in content)


def _squeezed(text: str) -> str:
    """Remove whitespace, which templates trim and add."""
    return "".join(text.split())


def _repeats(legacy: Any, calls: Sequence[Mapping[str, Any]]) -> bool:
    """True if a `function_call` names one of the calls."""
    name = legacy.get("name") if isinstance(legacy, Mapping) else legacy
    return any(call_of(call)["name"] == name for call in calls)


def _probed_call(call: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    """Replace name, keys and text values of a call by probe words."""
    inner = call_of(call)
    arguments = {
        probe(i, n, "key"): probe(i, n, "value") if value and isinstance(value, str) else value
        for n, value in enumerate(arguments_of(call).values())
    }
    is_text = isinstance(inner.get("arguments"), str)
    made = {**inner, "name": probe(i), "arguments": json.dumps(arguments) if is_text else arguments}
    return {**call, "function": made} if call.get("function") else made
