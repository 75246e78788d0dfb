"""Chat templates of a model folder, rendered as transformers renders them.

`apply_chat_template` of transformers is the reference for the choice of the template, its filters, names and variables.
One thing differs: `strftime_now` writes the date of the run, so a conversation has the same tokens in every service and
on every day.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
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
from shared.models.messages import arguments_of, call_of, with_reasoning

type Messages = Sequence[Mapping[str, Any]]
type Tools = Sequence[Mapping[str, Any]]
type Variables = Mapping[str, Any]
"""Values of a template's own variables, such as `enable_thinking`."""
_NOT_MEANT = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a template for values of an unexpected type: bytes, a decimal, text instead of a list."""
_PROBE = {"name": "probe_name", "arguments": {"probe_key": "1"}}
_REPR = repr(_PROBE["arguments"])
"""Arguments as written by a template that expects JSON text."""
_TEXT = '{"probe_key":"1"}'
"""Arguments as text, spaced unlike any template's output for an object."""
_NO_TEMPLATE = "add chat_template.jinja or chat_template in tokenizer_config.json"


class ChatTemplates:
    """Templates of a folder: `tool_use`, if present, renders conversations with tools, `default` all others.

    Attributes:
        names: variables that the templates read.
        given: values of all conversations: special tokens, and variables by `with_variables`.
        writes_date: a template calls `strftime_now`.
    """

    def __init__(self, texts: Mapping[str, str], special: Mapping[str, str], date: datetime.date | None = None) -> None:
        """Args: special: texts of the special tokens by name. Raises ConfigError."""
        self._templates = {name: compile_template(text, date) for name, text in texts.items()}
        self.given: dict[str, Any] = dict(special)
        parsed = {name: _parsed(text) for name, text in texts.items()}
        self._marked = {name for name, one in parsed.items() if _has_blocks(one)}
        self.names = frozenset[str]().union(*map(jinja2.meta.find_undeclared_variables, parsed.values()))
        self.writes_date = "strftime_now" in self.names
        self._form = cache(self._form_of_calls)

    def with_variables(self, variables: Variables) -> ChatTemplates:
        """Copy the templates with more variables. Unread variables have no effect, as in transformers."""
        made = copy(self)
        made.given = {**self.given, **variables}
        made._form = cache(made._form_of_calls)
        return made

    def render(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        prompt: bool = True,
        write: Callable[[jinja2.Template, Variables], str] = jinja2.Template.render,
    ) -> str:
        """Render a conversation, with `prompt` also the header of the next assistant turn. Raises InputError.

        Args:
            write: renders a template with variables.
        """
        name = self._name(tools)
        messages = [with_reasoning(message) for message in messages]
        try:
            if any(message.get("tool_calls") for message in messages):
                form = self._form(name)
                messages = [form.apply(message) for message in messages]
            own = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": prompt}
            return write(self._templates[name], {"documents": None, **own, **self.given})
        except (jinja2.TemplateError, *_NOT_MEANT) as error:
            raise InputError(f"the chat template refuses the conversation: {error}") from error

    def marks(self, tools: Tools) -> bool:
        """True if the template of a conversation with these tools has `{% generation %}` blocks."""
        return self._name(tools) in self._marked

    def _name(self, tools: Tools) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _form_of_calls(self, name: str) -> _Form:
        """Find the form of calls that a template writes. A form that it writes as Python's repr is the last choice."""
        found, texts = list[tuple[bool, bool, bool]](), list[bool]()
        for as_text, null in ((False, False), (False, True), (True, False), (True, True)):
            written = self._probe(name, json.dumps(_PROBE["arguments"]) if as_text else _PROBE["arguments"], null)
            if "probe_name" in written and "probe_key" in written:
                found.append((_REPR in written, as_text, null))
        for null in (False, True):
            written = self._probe(name, _TEXT, null)
            if "probe_name" in written and _TEXT in written:
                texts.append(null)
        _, as_text, null = min(found, default=(False, False, False), key=lambda one: one[0])
        return _Form(null, as_text, next(iter(texts), None))

    def _probe(self, name: str, arguments: Any, null: bool) -> str:
        """Render a conversation with a call; empty if the template refuses it."""
        call = {"id": "call00000", "type": "function", "function": {**_PROBE, "arguments": arguments}}
        answer = {"role": "assistant", "content": None if null else "", "tool_calls": [call]}
        variables = {"messages": [{"role": "user", "content": "?"}, answer], "tools": None, "documents": None}
        try:
            return self._templates[name].render(add_generation_prompt=False, **variables, **self.given)
        except (jinja2.TemplateError, *_NOT_MEANT):
            return ""


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of calls that a template expects.

    Attributes:
        null: content beside calls must be null.
        as_text: arguments must be JSON text.
        text_null: `null` where arguments are given as text; None if the template does not write that text as given.
    """

    null: bool
    as_text: bool
    text_null: bool | None

    def apply(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the calls of a message into this form. Text stays text if the template writes it as given."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        kept = self.text_null is not None and any(isinstance(call_of(call).get("arguments"), str) for call in calls)
        null = self.text_null if kept else self.null
        content = None if null and not message.get("content") else message.get("content")
        return {**message, "content": content, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = call_of(call)
        given = inner.get("arguments")
        if isinstance(given, str) and self.text_null is not None:
            return call
        arguments = arguments_of(call)
        made = {**inner, "arguments": json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments}
        return {**call, "function": made} if call.get("function") else made


def read_templates(folder: Path, settings: Mapping[str, Any], *, optional: bool = False) -> dict[str, str]:
    """Read a folder's templates by name. Files win over tokenizer_config.json. Raises ConfigError.

    Args:
        optional: of a folder without any, return one that refuses every conversation.
    """
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
    if optional and found is None:
        return {"default": "{{ raise_exception('the model has no chat template: send a text or ids') }}"}
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


block_writer: ContextVar[Callable[[Callable[[], str]], str] | None] = ContextVar("block_writer", default=None)
"""Writes each `{% generation %}` block that is rendered, if it is set."""


class _Generation(jinja2.ext.Extension):
    """Tag `{% generation %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        write = block_writer.get()
        return write(caller) if write else caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _parsed(text: str) -> jinja2.nodes.Template:
    return jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols], autoescape=True).parse(text)


def _has_blocks(parsed: jinja2.nodes.Template) -> bool:
    """True if the template has `{% generation %}` blocks, rendered or not."""
    return any(node.identifier == _Generation.identifier for node in parsed.find_all(jinja2.nodes.ExtensionAttribute))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "a chat template is text in UTF-8") from error
