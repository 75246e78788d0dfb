"""An assistant's turn as the chat template writes it: what a prompt ends with, and what the assistant then says.

The text of a turn is what the template adds to the prompt when the message follows it. Templates differ in two ways
from that. The generation prompt may open something that the template does not repeat (`<think>`, DeepSeek-R1), and the
template may drop the reasoning that stands in the content of a message. Content with its reasoning is then taken as
it is given, after what the prompt has opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shared.errors import InputError
from shared.models.messages import REASONING, arguments_of, call_of
from shared.models.templates import ChatTemplates, Messages, Spans, Tools

MARKER = "\u0001assistant\u0001"
_QUESTION = {"role": "user", "content": "?"}
_THOUGHT = "</think>"
_CONTEXT = 64  # characters


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt` is the text before the turn, `said` that of the turn, which the template may go on after its end.

    `opened` is the end of the generation prompt that `prompt` lacks, because the template does not write it before
    this answer; `whole` what the template writes of both; `spans` the parts of `said` in `{% generation %}` blocks.
    """

    prompt: str
    said: str
    whole: str
    opened: str = ""
    spans: Spans | None = None


class TurnRenderer:
    """Renders turns of the assistant with one set of chat templates."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates

    def check_written(self, before: Messages, messages: Messages, tools: Tools = (), after: str = "") -> None:
        """Raises InputError naming the role of a message that the template does not write.

        Args:
            after: end of the text of `before`, after which messages have to stand.
        """
        probed = [_probed(message, i) for i, message in enumerate(messages)]
        try:
            text = self._templates.render([*before, *probed], tools)
        except InputError:  # the template reads the texts of messages
            return
        start = text.find(after)
        _check_probes(probed, text[start + len(after) :] if start >= 0 else text)

    @property
    def writes_text(self) -> bool:
        """Whether the template writes what a user says; also true where it refuses a single message."""
        try:
            return MARKER in self._templates.render([{"role": "user", "content": MARKER}])
        except InputError:
            return True

    @cached_property
    def closing(self) -> str:
        """Text that the template writes after an assistant's words at the end of a conversation."""
        said = {"role": "assistant", "content": MARKER}
        return self._templates.render([_QUESTION, said], prompt=False).partition(MARKER)[2]

    @cached_property
    def _writes_content(self) -> bool:
        said = {"role": "assistant", "content": MARKER}
        return MARKER in self._templates.render([_QUESTION, said], prompt=False)

    def before_next(self, messages: Messages) -> str | None:
        """Text after an assistant's words: its end, `messages`, and the next header. None if no words are written.

        Raises InputError naming the role of a message that the template does not write there.
        """
        before = [_QUESTION, {"role": "assistant", "content": MARKER}]
        _, found, text = self._templates.render([*before, *messages]).partition(MARKER)
        if not found:
            return None
        self.check_written(before, messages, after=MARKER)
        return text

    def turn(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> Turn:
        """Turn of `message` after `before`. Raises InputError naming what the template does not write."""
        turn = self._added(before, message, tools)
        context = before if turn else [_QUESTION]
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
        if _THOUGHT not in content or calls or not self._writes_content or _squeezed(answer) not in whole:
            raise InputError(
                "the chat template leaves out content of the assistant", "use a template that writes it whole"
            )
        return self._verbatim(turn, content)

    def _check_calls(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> None:
        """Raises InputError naming a call or an argument that the template does not write."""
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
            if _probe(i) not in text:
                raise InputError(
                    f"the chat template leaves out the call of {inner['name']}: it knows no tool_calls",
                    "write calls into content, in the format that the model is to use",
                )
            written = arguments_of(probed["tool_calls"][i])
            for (key, value), (probe, other) in zip(arguments_of(call).items(), written.items(), strict=True):
                if probe not in text or (other != value and other not in text):
                    raise InputError(f"the chat template leaves out the argument {key} of the call of {inner['name']}")

    def _drops(self, before: Messages, message: Mapping[str, Any], tools: Tools, keys: Sequence[str]) -> bool:
        """Whether the template writes the same without these keys of a message."""
        without = {key: one for key, one in message.items() if key not in keys}
        try:
            texts = [
                self._templates.render([*before, {"content": "", **one}], tools, prompt=False)
                for one in (message, without)
            ]
        except InputError:
            return False
        return texts[0] == texts[1]

    def _verbatim(self, turn: Turn, content: str) -> Turn:
        """The turn with its content as given: the template drops the reasoning in it."""
        said = content
        if _opens(content, turn.opened):
            said = content.lstrip().removeprefix(turn.opened.strip())
            said = said.lstrip("\n") if turn.opened.endswith("\n") else said
        return Turn(turn.prompt + turn.opened, said + self.closing, turn.whole)

    def _alone(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> Turn:
        """The turn as it is after a question: the template edits the conversation before it. Raises InputError."""
        turn = self._added([_QUESTION], message, tools)
        if turn is None:
            raise InputError(
                "the chat template edits the conversation when the assistant's message is added",
                "the end of the prompt and the beginning of the answer cannot be told apart",
            )
        return replace(turn, prompt=self._templates.render(before, tools).removesuffix(turn.opened))

    def _added(self, before: Messages, message: Mapping[str, Any], tools: Tools) -> Turn | None:
        """Text that `message` adds to the prompt; None if the text before it changes."""
        prompt = self._templates.render(before, tools)
        whole, spans = self._templates.render_marked([*before, message], tools)
        if whole.startswith(prompt):
            return Turn(prompt, whole[len(prompt) :], whole, spans=_from(spans, len(prompt)))
        said = {"role": "assistant", "content": MARKER}
        plain = self._templates.render([*before, said], tools, prompt=False).partition(MARKER)[0]
        base, n = self._templates.render(before, tools, prompt=False), _common(_common_text(prompt, plain), whole)
        if n < len(plain) and not (n > len(base) and whole.startswith(base)):
            return None
        return Turn(whole[:n], whole[n:], whole, opened=prompt[n:], spans=_from(spans, n))


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _common_text(one: str, other: str) -> str:
    return one[: _common(one, other)]


def _from(spans: Spans | None, start: int) -> Spans | None:
    if spans is None:
        return None
    return tuple((max(begin - start, 0), end - start) for begin, end in spans if end > start)


def _opens(content: str, opened: str) -> bool:
    """Whether the content is to stand after what the prompt has opened."""
    if not opened.strip():
        return False
    return content.lstrip().startswith(opened.strip()) or (opened.strip() == "<think>" and _THOUGHT in content)


def _squeezed(text: str) -> str:
    """Text without whitespace, which templates trim and add."""
    return "".join(text.split())


def _repeats(legacy: Any, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a `function_call` names one of the calls."""
    name = legacy.get("name") if isinstance(legacy, Mapping) else legacy
    return any(call_of(call)["name"] == name for call in calls)


def _probe(*place: object) -> str:
    """A word that stands in no conversation."""
    return "x".join(("probe", *map(str, place), "end"))


def _probed(message: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    return message if message["role"] == "assistant" else {**message, "content": _probe(i)}


def _check_probes(probed: Messages, text: str) -> None:
    written = text.lower()
    for message in probed:
        if message["role"] != "assistant" and message["content"] not in written:
            raise InputError(
                f"the chat template leaves out messages of role {message['role']} at this place in the conversation",
                "use a role that it writes there, such as user",
            )


def _probed_call(call: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    """A call with another name, other keys, and other texts as values."""
    inner = call_of(call)
    arguments = {
        _probe(i, n, "key"): _probe(i, n, "value") if value and isinstance(value, str) else value
        for n, value in enumerate(arguments_of(call).values())
    }
    is_text = isinstance(inner.get("arguments"), str)
    made = {**inner, "name": _probe(i), "arguments": json.dumps(arguments) if is_text else arguments}
    return {**call, "function": made} if call.get("function") else made
