"""Configuration that all external servers share."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, JsonValue, PositiveInt, model_validator

from shared.section import Section

SELF = "self"
"""Address of a teacher that is the run's own rollout servers."""
INFORMATION = ("expected", "feedback", "sibling")
"""Placeholders of a teacher's template for what the policy does not know."""
_PLACEHOLDERS = (*INFORMATION, "prompt")


def _http(url: str) -> str:
    if not re.match(r"^https?://[^/\s@?#]+(/[^\s?#]*)?$", url):
        raise ValueError(
            "must be an http or https address without credentials or a query, like http://10.0.0.7:8000/v1"
        )
    return url.rstrip("/")


class ForeignServerSection(Section):
    """An external server.

    `token_file` is a secret file with its API key. `timeout_s` bounds one request; at most `max_concurrent` run at
    once. `max_requests` and `max_tokens` are the budget of the whole run: once it is used up, episodes that need
    another answer fail.
    """

    url: Annotated[str, AfterValidator(_http)]
    token_file: Path | None = None
    max_concurrent: Annotated[int, Field(ge=1, le=1024)] = 16
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    max_requests: PositiveInt | None = None
    max_tokens: PositiveInt | None = None


def placeholders(template: str) -> frozenset[str]:
    """Return the names in the braces of a template. Raises ValueError for text that is no template."""
    return frozenset(name for _, name, _, _ in string.Formatter().parse(template) if name is not None)


def _address(url: str) -> str:
    if url == SELF:
        return url
    try:
        return _http(url)
    except ValueError as error:
        raise ValueError(f"{error}, or {SELF}, the run's own servers") from None


def _template(text: str) -> str:
    """Check a template. Raises ValueError."""
    allowed = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
    try:
        parts = [*string.Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"is no template: {error}; a brace is written {{{{ or }}}}") from error
    for _, name, form, conversion in parts:
        if name is not None and (name not in _PLACEHOLDERS or form or conversion):
            raise ValueError(
                f"has the placeholder {{{name[:40]}}}, but only {allowed} exist; a brace is written {{{{ or }}}}"
            )
    if text.strip() in ("", "{prompt}"):
        raise ValueError(
            "tells the teacher nothing that the policy does not know: add a text of your own, or one of"
            f" {allowed[: allowed.rindex(',')]}"
        )
    return text


class TeacherServer(ForeignServerSection):
    """Server that returns log-probabilities of given tokens.

    With a `model`, `url` is the base of an OpenAI-compatible API (…/v1) that serves it; without, the root of a server
    with SGLang's /generate, such as a rollout server; `self` are the run's own rollout servers. `request` adds fields
    to the request, and removes those that it sets to null. `templates` are texts that the teacher is shown instead of
    the first message, with {prompt}, {expected}, {feedback} and {sibling}; the first that can be filled is used.
    """

    url: Annotated[str, AfterValidator(_address)]
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    templates: tuple[Annotated[str, Field(max_length=20_000), AfterValidator(_template)], ...] = ()

    @property
    def is_self(self) -> bool:
        return self.url == SELF

    @model_validator(mode="after")
    def _of_own_servers(self) -> Self:
        if not self.is_self:
            return self
        if not self.templates:
            raise ValueError("url=self needs templates: shown the same as the policy, it would teach nothing")
        if alien := [name for name in ("model", "request", "token_file") if getattr(self, name)]:
            raise ValueError(f"{alien[0]} is of another server, but url=self are the run's own")
        return self
