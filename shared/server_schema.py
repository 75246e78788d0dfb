"""Configuration that all external servers share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, PositiveInt

from shared.section import Section


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


class TeacherServer(ForeignServerSection):
    """Server that returns log-probabilities of given tokens.

    With a `model`, `url` is the base of an OpenAI-compatible API (…/v1) that serves it; without, the root of a server
    with SGLang's /generate, such as a rollout server. `request` adds fields to the request, and removes those that it
    sets to null.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
