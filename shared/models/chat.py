"""Chat text to tokens and back, with the exact-prefix property: tokens of earlier turns are never made anew.

A conversation grows by appending. `render_prompt` makes the first tokens; after the model's own sampled ids,
`render_continuation` makes only the environment's new text and the header of the next assistant turn. The template
(`chat_template` of the Hugging Face folder, run in a sandbox) is asked for that text with a marker in place of the
assistant's words, so nothing the model said is rendered or tokenized again.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from shared.errors import ConfigError, InputError

type Messages = Sequence[Mapping[str, Any]]
_MARKER = "\u0001assistant\u0001"
_NOT_MEANT = (TypeError, ValueError, AttributeError, RecursionError)
"""What templates raise over values that they were not written for: bytes, a decimal, text where a list is meant."""


class ChatTokenizer:
    """Tokenizer and chat template of a Hugging Face folder.

    Attributes:
        vocab_size: number of ids, including special ones.
        eos_id: the token that ends an assistant turn: `eos_token`, or another special token with which the template
            closes it, as Gemma's does.
        pad_id: a token that is never part of a conversation.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming what the folder lacks."""
        self._settings = _read_json(folder / "tokenizer_config.json")
        tokenizer_file = folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ConfigError(
                f"{tokenizer_file} is missing", "model.path must name a Hugging Face folder with a tokenizer"
            )
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._template = compile_template(_template_text(self._settings, folder))
        eos = _token_text(self._settings, "eos_token", folder)
        self._special(eos, folder)
        self._eos = self._turn_end(eos)
        self.eos_id = self._special(self._eos, folder)
        self.pad_id = self._special(_token_text(self._settings, "pad_token", folder), folder)
        if self.pad_id == self.eos_id:
            raise ConfigError(
                f"{folder}: pad_token and eos_token are the same token", "training needs a pad token of its own"
            )
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def _turn_end(self, eos: str) -> str:
        try:
            closing = self._closing
        except InputError:  # which whoever renders a conversation is told
            return eos
        special = (one.content for one in self._tokenizer.get_added_tokens_decoder().values() if one.special)
        found = [one for one in special if closing.startswith(one)]
        return eos if closing.startswith(eos) else max(found, key=len, default=eos)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none is added. Raises InputError for what is no
        text in UTF-8: half of a surrogate pair.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError("there is half of a surrogate pair in the text: it is not valid Unicode") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """Text of one token, for display."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def message_text(self, sampled_ids: Sequence[int]) -> str:
        """What the assistant said: its sampled ids without the end-of-turn token."""
        ended = bool(sampled_ids) and sampled_ids[-1] == self.eos_id
        return self.decode(sampled_ids[:-1] if ended else sampled_ids)

    def render_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a conversation up to and including the header of the next assistant turn. Raises InputError."""
        return self.encode(self._render(messages, tools))

    def render_continuation(self, messages: Messages, *, ended: bool) -> list[int]:
        """Ids to append after an assistant turn: its missing end, `messages`, and the next assistant header.

        Args:
            ended: the sampled ids already close the turn with `eos_id`.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
        _, found, text = self._render([*before, *messages], ()).partition(_MARKER)
        if not found or not text.startswith(self._eos):
            raise ConfigError(f"the chat template does not close an assistant turn with {self._eos}")
        return self.encode(text.removeprefix(self._eos) if ended else text)

    def said(self, message: Mapping[str, Any]) -> str:
        """The text of an assistant's message: its content and, as the chat template writes them, its `tool_calls`.
        Raises InputError if the template leaves them out, and for the end-of-turn token within: no rollout goes on
        after it, and half a turn would be learned.
        """
        content, calls = message.get("content") or "", message.get("tool_calls")
        after = self._after_marker({**message, "content": _MARKER}) if calls else ""
        if self._eos in content or (after and after.count(self._eos) > self._closing.count(self._eos)):
            raise InputError(
                f"the assistant says {self._eos}, which ends a turn: no rollout goes on after it",
                "leave it out; the chat template writes it at the end",
            )
        if not calls:
            return content
        told = after.partition(self._eos)[0]
        missing = [name for call in calls if (name := str(_function(call)["name"])) not in told]
        if missing:
            raise InputError(
                f"the chat template leaves out the call of {missing[0]}: it knows no tool_calls",
                "write calls into content, in the format that the model is to use",
            )
        return content + (told if content else told.lstrip("\n"))

    @cached_property
    def _closing(self) -> str:
        """What the template writes after an assistant's words at the end of a conversation."""
        return self._after_marker({"role": "assistant", "content": _MARKER})

    def _after_marker(self, message: Mapping[str, Any]) -> str:
        return self._render([{"role": "user", "content": "?"}, message], ()).partition(_MARKER)[2]

    def leaves_out(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template writes nothing of the `tools` into the prompt of a demonstration. Raises InputError."""
        before = [*takewhile(lambda message: message["role"] != "assistant", messages)]
        return bool(tools) and self._render(before, tools) == self._render(before, ())

    def render_demonstration(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), learned: Sequence[bool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a finished conversation, token for token as a rollout of it would be recorded.

        Args:
            learned: for each message whether its tokens have mask 1, if it is the assistant's; None: all of them.
        """
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
        if first is None or messages[-1]["role"] != "assistant":
            raise InputError("a demonstration must end with an assistant message")
        ids = self.render_prompt(messages[:first], tools)
        mask = [0] * len(ids)
        pending: list[Mapping[str, Any]] = []
        counts = [1] * len(messages) if learned is None else [int(one) for one in learned]
        for message, count in zip(messages[first:], counts[first:], strict=True):
            if message["role"] != "assistant":
                pending.append(message)
                continue
            glue = self.render_continuation(pending, ended=True) if pending else []
            said = [*self.encode(self.said(message)), self.eos_id]
            ids += glue + said
            mask += [0] * len(glue) + [count] * len(said)
            pending = []
        return ids, mask

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
                **_special_texts(self._settings),
            )
        except (jinja2.TemplateError, *_NOT_MEANT) as error:
            raise InputError(f"the chat template refuses the conversation: {error}") from error

    def _special(self, text: str, folder: Path) -> int:
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise ConfigError(f"{folder}: token {text!r} is not in the vocabulary")
        return found


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name and arguments, which older formats have in the call itself."""
    return call.get("function") or call


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "model.path must name a Hugging Face folder with a tokenizer"
        ) from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _token_text(settings: Mapping[str, Any], name: str, folder: Path) -> str:
    value = settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if not text:
        raise ConfigError(f"{folder}/tokenizer_config.json names no {name}")
    return str(text)


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token")
    values = {name: settings.get(name) for name in names}
    return {name: v["content"] if isinstance(v, dict) else v for name, v in values.items() if v}


def _template_text(settings: Mapping[str, Any], folder: Path) -> str:
    beside = folder / "chat_template.jinja"
    text = beside.read_text(encoding="utf-8") if beside.is_file() else settings.get("chat_template")
    if not isinstance(text, str):
        raise ConfigError(
            f"{folder} has no chat template", "add chat_template.jinja or chat_template in tokenizer_config.json"
        )
    return text


def compile_template(text: str) -> jinja2.Template:
    """A chat template with what Hugging Face's templates expect, run in Jinja's sandbox. Raises ConfigError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    names: dict[str, Any] = environment.globals
    names["raise_exception"] = refuse
    names["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template is not valid: {error}") from error
