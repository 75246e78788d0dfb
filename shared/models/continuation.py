"""Text that a chat template writes after an assistant's turn, within its conversation.

A rollout keeps the tokens of a conversation and appends those of new messages. So the template must begin the longer
conversation with the text of the shorter one; `HistoryChanged` is raised if it does not. The conversation is rendered
with a marker in place of the assistant's words, so these are never rendered or tokenized again.

One difference is allowed: a block of reasoning before the assistant's words. Templates drop the reasoning of earlier
turns, open it in the prompt, or write an empty one; a rollout keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.errors import ConfigError, InputError
from shared.models.messages import REASONING, call_of
from shared.models.templates import ChatTemplates, Messages, Tools
from shared.models.turns import MARKER, TurnRenderer, common_length, rest_after

_KEY, _END = "probexkeyxend", "probexvaluexend"
_EXCERPT = 24  # characters
_WORDS = "an answer is shortened, replaced or left out"


class HistoryChanged(InputError):
    """The chat template changes earlier messages when later ones are added."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Text after the words of an assistant's turn, or after the arguments of its last call.

    The first `n_own` characters still belong to the turn; None if the text begins with the turn's usual end. `begun` is
    what the template writes between the prompt and the words; the answer has to say it.
    """

    text: str
    n_own: int | None = None
    begun: str = ""


class ContinuationRenderer:
    """Renderer of the text after assistant's turns with one set of chat templates."""

    def __init__(self, templates: ChatTemplates, turns: TurnRenderer) -> None:
        self._templates, self._turns = templates, turns

    def after_turn(self, conversation: Messages, messages: Messages, tools: Tools = ()) -> Continuation:
        """Render the text after an assistant's turn: the turn's end, `messages`, and the next header.

        Args:
            conversation: messages up to the assistant's turn.

        Raises HistoryChanged, InputError naming the role of a message that is left out, and ConfigError if the template
        writes no words of an assistant.
        """
        if not self._turns.writes_content:
            raise ConfigError("the chat template does not write the content of an assistant's message")
        if not self._keeps_words:
            raise changed(_WORDS)
        *before, said = conversation
        history = [_marked(message) for message in before]
        prompt = self._templates.render(history, tools)
        if said.get("tool_calls") and (found := self._after_calls(history, said, messages, tools, prompt)) is not None:
            return found
        last = {"role": "assistant", "content": MARKER}
        head, _, text = self._templates.render([*history, last, *messages], tools).rpartition(MARKER)
        begun = _check_history(prompt, [*head.split(MARKER), ""])
        if begun:
            alone = self._templates.render([*history, last], tools, prompt=False).rpartition(MARKER)[0]
            _check_same(alone.rpartition(MARKER)[2], head.rpartition(MARKER)[2])
        self._turns.check_written([*history, last], messages, tools, after=MARKER)
        return Continuation(text, begun=begun)

    def _after_calls(
        self, history: Messages, said: Mapping[str, Any], messages: Messages, tools: Tools, prompt: str
    ) -> Continuation | None:
        """Render the text after calls; None if the template does not write them so."""
        *calls, call = said["tool_calls"]
        inner = {**call_of(call), "arguments": {_KEY: _END}}
        last = {**_marked(said), "tool_calls": [*calls, {**call, "function": inner} if call.get("function") else inner]}
        try:
            whole = self._templates.render([*history, last, *messages], tools)
            alone = self._templates.render([*history, last], tools, prompt=False)
            plain = self._templates.render([*history, {"role": "assistant", "content": MARKER}], tools, prompt=False)
        except InputError:  # the template reads the arguments, or the messages do not answer the calls
            return None
        (head, found, text), (start, _, end) = whole.rpartition(_END), alone.rpartition(_END)
        if not found:
            return None
        begun = _check_history(prompt, head.split(MARKER), calls_follow=not last["content"])
        if not last["content"]:  # what stands there before words, too, does not belong to the call
            words = _check_history(prompt, plain.split(MARKER))
            begun = words if begun.startswith(words) else ""
        n = prompt.count(MARKER)
        for was, now in zip(start.split(MARKER)[n:], head.split(MARKER)[n:], strict=False):
            _check_same(was, now)
        self._turns.check_written([*history, last], messages, tools, after=_END)
        return Continuation(text, common_length(end, text), begun)

    @cached_property
    def _keeps_words(self) -> bool:
        """False if the template shortens long answers."""
        question, answer = {"role": "user", "content": "?"}, MARKER + "word " * 2000 + MARKER
        try:
            return answer in self._templates.render([question, {"role": "assistant", "content": answer}, question])
        except InputError:
            return True

    def after_any(self, messages: Messages) -> Continuation:
        """Render the text after a turn of an unknown conversation. Raises HistoryChanged if it depends on that one."""
        texts = [self.after_turn(talk, messages) for talk in (_talk(1)[:2], _talk(3)[:6])]
        if texts[0] != texts[1]:
            raise HistoryChanged(
                "what the chat template writes for new messages depends on the conversation before them",
                "give that conversation",
            )
        return texts[0]


def talks(*, calls: bool) -> Iterator[tuple[Messages, Tools]]:
    """Conversations of the shapes that runs have, each also with a system message; `calls` adds tool_calls."""
    system = {"role": "system", "content": "Be brief."}
    made = [(_talk(3), ()), (_talk(3), _TOOLS), (_talk(3, results=True), _TOOLS)]
    for talk, tools in [*made, *([(_talk(3, results=True, calls=True), _TOOLS)] if calls else [])]:
        yield talk, tools
        yield [system, *talk], tools


def _talk(n: int, *, results: bool = False, calls: bool = False) -> list[Mapping[str, Any]]:
    """Make a conversation of n questions and answers, and a last question; before answers are calls and results."""
    talk = list[Mapping[str, Any]]()
    for i in range(n):
        talk.append({"role": "user", "content": f"question {i}"})
        call = {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": {"a": i}}}
        if results:
            said = {"content": "", "tool_calls": [call]} if calls else {"content": f"call {i}"}
            talk.append({"role": "assistant", **said})
            talk.append({"role": "tool", "content": f"result {i}", "tool_call_id": call["id"], "name": "add"})
        talk.append({"role": "assistant", "content": f"answer {i}"})
    return [*talk, {"role": "user", "content": "last question"}]


_ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _ARGUMENTS}}]


def _marked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a marker for an assistant's words, and without reasoning."""
    if message["role"] != "assistant":
        return message
    content = "" if message.get("tool_calls") and not message.get("content") else MARKER
    return {**{key: value for key, value in message.items() if key not in REASONING}, "content": content}


def _check_history(prompt: str, found: Sequence[str], *, calls_follow: bool = False) -> str:
    """Compare the text between an assistant's words in a prompt and in what is `found` later. Raises HistoryChanged.

    Returns what is found between the prompt and the next words, without the end of a block that the prompt opens.

    Args:
        calls_follow: the last text found has the header and the beginning of a call.
    """
    *texts, header = prompt.split(MARKER)
    if len(found) <= len(texts) + (not calls_follow):
        raise changed(_WORDS)
    for was, now in zip(texts, found, strict=False):
        _check_same(was, now)
    begun = rest_after(header, found[len(texts)])
    if begun is None:
        raise changed(_becomes(header, found[len(texts)]))
    return begun.strip().removeprefix("</think>").strip()


def _check_same(was: str, now: str) -> None:
    if rest_after(was, now) != "":
        raise changed(_becomes(was, now))


def _becomes(was: str, now: str) -> str:
    n = common_length(was, now)
    excerpts = (text[max(n - 8, 0) :][:_EXCERPT] for text in (was, now))
    return " becomes ".join(map(repr, excerpts))


def changed(how: str) -> HistoryChanged:
    """Make the error, with how the messages change."""
    return HistoryChanged(
        f"the chat template changes earlier messages when later ones are added: {how}",
        "train on one answer a conversation, or use a template that only appends",
    )
