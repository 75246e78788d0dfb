"""Chat templates of a model folder, rendered as transformers renders them.

`apply_chat_template` of transformers is the reference for which template is chosen, which filters and names it finds,
and which variables it gets. One thing differs: `strftime_now` writes the date of the run, so the same conversation has
the same tokens in every service and on every day.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shared.errors import ConfigError, InputError
from shared.models.messages import call_of

type Messages = Sequence[Mapping[str, Any]]
type Tools = Sequence[Mapping[str, Any]]
type Variables = Mapping[str, Any]
"""Values of a template's own variables, such as `enable_thinking`."""
type Spans = tuple[tuple[int, int], ...]
"""Parts of a text, in characters, from the first to before the last."""
_NOT_MEANT = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a template given values that it was not written for: bytes, a decimal, text in place of a list."""
_BEGIN, _END = "\ue0f0", "\ue0f1"
_marked: ContextVar[bool] = ContextVar("_marked", default=False)
_PROBE = {"name": "probe_name", "arguments": {"probe_key": "1"}}
_REPR = repr(_PROBE["arguments"])
"""Arguments that a template writes as they are: it expects JSON text."""
_NONE: Variables = {}
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names that a template reads and that are no variables of its own."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of words to continue; a template that trims them also trims its space."""
_NO_TEMPLATE = "add chat_template.jinja or chat_template in tokenizer_config.json"


class ChatTemplates:
    """The templates of a folder: `tool_use`, if there is one, renders conversations with tools, `default` all others.

    Attributes:
        names: variables that the templates read.
        writes_date: a template calls `strftime_now`.
    """

    def __init__(self, texts: Mapping[str, str], special: Mapping[str, str], date: datetime.date | None = None) -> None:
        """Args: special: texts of the special tokens by name. Raises ConfigError."""
        self._templates = {name: compile_template(text, date) for name, text in texts.items()}
        self._special = dict(special)
        self._names = {name: _names(text) for name, text in texts.items()}
        self.names = frozenset[str]().union(*self._names.values())
        self.writes_date = "strftime_now" in self.names
        self._form = cache(self._form_of_calls)

    def render(
        self, messages: Messages, tools: Tools = (), variables: Variables = _NONE, *, prompt: bool = True
    ) -> str:
        """Text of a conversation; with `prompt` up to the header of the assistant's next turn. Raises InputError."""
        try:
            return self._render(messages, tools, prompt, variables)
        except (jinja2.TemplateError, *_NOT_MEANT) as error:
            raise InputError(f"the chat template refuses the conversation: {error}") from error

    def render_unfinished(self, messages: Messages, tools: Tools = (), variables: Variables = _NONE) -> str:
        """Text of a conversation up to the last word of its last message, as `continue_final_message` asks for.

        Raises InputError if the template does not write the content of that message as it is.
        """
        *before, last = messages
        content = last["content"]
        if last.get("tool_calls"):
            raise InputError(
                "the message to continue has tool_calls, which the text after its content would cut off",
                "leave them out, or write them into content",
            )
        text = self.render([*before, {**last, "content": content + _TAG}], tools, variables, prompt=False)
        text, found, after = text.rpartition(_TAG.strip())
        if not found or content.strip() not in text:
            raise InputError("the chat template does not write the content of the message to continue as it is")
        return text if after.startswith(" ") else text.rstrip()

    def render_marked(self, messages: Messages, tools: Tools) -> tuple[str, Spans | None]:
        """Text of a finished conversation, and what lies in `{% generation %}` blocks; None without such blocks."""
        plain = self.render(messages, tools, prompt=False)
        with _marking():
            text = self.render(messages, tools, prompt=False)
        if text == plain:
            return plain, None
        spans = tuple(_spans(text))
        if text.replace(_BEGIN, "").replace(_END, "") != plain:
            raise InputError(
                "the chat template edits the text of its {% generation %} blocks",
                "put the blocks around what is written, or remove them",
            )
        return plain, spans

    def _render(self, messages: Messages, tools: Tools, prompt: bool, variables: Variables = _NONE) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if unread := sorted(variables.keys() - (self._names[name] - _OWN)):
            known = ", ".join(sorted(self._names[name] - _OWN - self._special.keys()))
            raise InputError(
                f"the chat template has no variable {unread[0][:80]!r}", f"variables that it reads: {known or 'none'}"
            )
        if any(message.get("tool_calls") for message in messages):
            null, text = self._form(name)
            messages = [_with_calls(message, null=null, text=text) for message in messages]
        given = {**self._special, **variables}
        return self._templates[name].render(
            messages=messages, tools=list(tools) or None, documents=None, add_generation_prompt=prompt, **given
        )

    def _form_of_calls(self, name: str) -> tuple[bool, bool]:
        """Form in which a template writes calls: whether content has to be null, and arguments to be JSON text.

        A form whose arguments are written as Python's repr is taken if there is no other.
        """
        call = {"id": "call00000", "type": "function", "function": _PROBE}
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        found = []
        for null, text in ((False, False), (True, False), (False, True), (True, True)):
            messages = [_with_calls(message, null=null, text=text) for message in asked]
            try:
                written = self._templates[name].render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=False, **self._special
                )
            except (jinja2.TemplateError, *_NOT_MEANT):
                continue
            if "probe_name" in written and "probe_key" in written:
                found.append((_REPR in written, null, text))
        return min(found, default=(False, False, False), key=lambda one: one[0])[1:]


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of a folder's templates by name: files win over tokenizer_config.json. Raises ConfigError."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {
        path.name.removesuffix(".jinja"): path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    found: Any = {name: _read(path) for name, path in files.items() if path.is_file()} or settings.get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {str(one.get("name")): one.get("template") for one in found}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, dict) and found and all(isinstance(text, str) for text in found.values()):
        if "default" not in found:
            names = ", ".join(map(repr, found))
            raise ConfigError(f"{folder} has the chat templates {names}, and no 'default'", "name one of them default")
        return found
    raise ConfigError(f"{folder} has no chat template", _NO_TEMPLATE)


def compile_template(text: str, date: datetime.date | None = None) -> jinja2.Template:
    """Compile a chat template in Jinja's sandbox, with the filters and names of transformers. Raises ConfigError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        day = date or datetime.datetime.now(datetime.UTC).date()
        return datetime.datetime.combine(day, datetime.time()).strftime(form)

    names: dict[str, Any] = environment.globals
    names["raise_exception"] = refuse
    names["strftime_now"] = strftime_now
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the chat template is not valid: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}" if _marked.get() else caller()


@contextmanager
def _marking() -> Iterator[None]:
    token = _marked.set(True)
    try:
        yield
    finally:
        _marked.reset(token)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Parts between marks, in characters of the text without marks."""
    at, depth, begin = 0, 0, 0
    for letter in text:
        if letter == _BEGIN:
            begin = begin if depth else at
            depth += 1
        elif letter == _END:
            depth -= 1
            if not depth:
                yield begin, at
        else:
            at += 1


def _with_calls(message: Mapping[str, Any], *, null: bool, text: bool) -> Mapping[str, Any]:
    """A message with its calls in the form that a template writes."""
    calls = message.get("tool_calls")
    if not calls or not (null or text):
        return message
    made = {**message, "content": None if null and not message.get("content") else message.get("content")}
    return {**made, "tool_calls": [_with_text(call) for call in calls]} if text else made


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = call_of(call)
    made = {**inner, "arguments": json.dumps(inner.get("arguments"), ensure_ascii=False)}
    return {**call, "function": made} if call.get("function") else made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _names(text: str) -> set[str]:
    parsed = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols], autoescape=True).parse(text)
    return jinja2.meta.find_undeclared_variables(parsed)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "a chat template is text in UTF-8") from error
