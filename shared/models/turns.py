"""An assistant's turn as the chat template writes it: what a prompt ends with, and what the assistant then says.

The text of a turn is what the template adds to the prompt when the message follows it. Templates differ in two ways
from that. The generation prompt may open something that the template does not repeat (`<think>`, DeepSeek-R1), and the
template may drop the reasoning that stands in the content of a message. Content with its reasoning is then taken as
it is given, after what the prompt has opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shared.errors import InputError
from shared.models.messages import REASONING, call_of
from shared.models.templates import ChatTemplates, Messages, Spans, Tools

MARKER = "\u0001assistant\u0001"
_QUESTION = {"role": "user", "content": "?"}
_PROBE = "probe_content"
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
        self._writes = cache(self._writes_role)

    def check_roles(self, messages: Messages) -> None:
        """Raises InputError for a role whose messages the template does not write."""
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            if role != "assistant" and not self._writes(role):
                raise InputError(
                    f"the chat template leaves out messages of role {role}", "use a role that it writes, such as user"
                )

    def _writes_role(self, role: str) -> bool:
        """Also true where the template refuses this conversation: it refuses others by itself."""
        message = {"role": role, "content": _PROBE, "name": "f", "tool_call_id": "call00000"}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        asked = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, message]
        try:
            return _PROBE in self._templates.render(asked if role == "tool" else [message, _QUESTION])
        except InputError:
            return True

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
        """Text after an assistant's words: its end, `messages`, and the next header. None if no words are written."""
        asked = [_QUESTION, {"role": "assistant", "content": MARKER}, *messages]
        _, found, text = self._templates.render(asked).partition(MARKER)
        return text if found else None

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
        for call in calls:
            _check_call(call, whole)
        legacy = message.get("function_call")
        if calls and content and self._drops(context, message, tools, ["content"]):
            raise InputError(
                "the chat template leaves out content beside tool_calls",
                "leave content empty there, or write the calls into it",
            )
        if legacy and str(call_of(legacy).get("name") if isinstance(legacy, Mapping) else legacy) not in whole:
            raise InputError("the chat template leaves out function_call", "write it as tool_calls")
        if _squeezed(content) in whole and not _opens(content, turn.opened):
            return turn
        answer = content.rpartition(_THOUGHT)[2]
        if _THOUGHT not in content or calls or not self._writes_content or _squeezed(answer) not in whole:
            raise InputError(
                "the chat template leaves out content of the assistant", "use a template that writes it whole"
            )
        return self._verbatim(turn, content)

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


def _check_call(call: Mapping[str, Any], whole: str) -> None:
    inner = call_of(call)
    name, arguments = str(inner["name"]), inner.get("arguments") or {}
    if _squeezed(name) not in whole:
        raise InputError(
            f"the chat template leaves out the call of {name}: it knows no tool_calls",
            "write calls into content, in the format that the model is to use",
        )
    missing = [key for key in arguments if _squeezed(key) not in whole and key.isascii()]
    if missing:
        raise InputError(f"the chat template leaves out the argument {missing[0]} of the call of {name}")
