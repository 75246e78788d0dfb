"""Entries of the durable record: requests, futures, checkpoints, and how requests were settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from shared.errors import InputError, NonFinite, VolleyError, WeightsError
from volley_tinker.server.specs import ModelSpec

type Outcome = Literal["done", "failed"]
JSON = "application/json"
UNNAMED = "ephemeral-"


@dataclass(frozen=True, slots=True)
class Request:
    """A request to record; `digest` identifies what it asks for, in hex."""

    owner: str
    seq: int
    kind: str
    body: bytes
    media: str
    digest: str

    @property
    def id(self) -> str:
        return f"{self.owner}:{self.seq}"


@dataclass(frozen=True, slots=True)
class Future:
    """A recorded request; `outcome` is None until it is settled, `body` once it is no longer needed.

    `result` is None before, and once it has expired.
    """

    id: str
    owner: str
    seq: int
    kind: str
    body: bytes | None
    media: str
    outcome: Outcome | None
    result: bytes | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state, `training` with optimizer or `sampler`; `path` is its tinker:// address, `file` relative."""

    path: str
    model: str
    kind: str
    name: str
    file: str
    digest: str
    size: int
    created: float
    expires: float | None
    public: bool
    spec: Mapping[str, Any]
    metadata: Mapping[str, str] | None

    @property
    def is_unnamed(self) -> bool:
        """True for a sampler's weights that the client did not name."""
        return self.kind == "sampler" and self.name.startswith(UNNAMED)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Result of a request.

    `weights` is the checksum of the model's weights if the request changed them; `checkpoint` one that it wrote, and
    `sampler` (id, session, path) a sampling session that it opened.
    """

    outcome: Outcome
    result: bytes
    weights: str = ""
    checkpoint: Checkpoint | None = None
    sampler: tuple[str, str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Past of a model: its specification, its saved state (number, file, checksum), and the settled requests after it,
    each with the checksum of weights that it left.
    """

    spec: ModelSpec
    state: tuple[int, str, str] | None
    after: Sequence[tuple[Future, str]]


def failed(error: VolleyError) -> RequestResult:
    """Return the result of a request that failed."""
    category = "user" if isinstance(error, InputError | WeightsError | NonFinite) else "server"
    text = error.detail + (f" ({error.hint})" if error.hint else "")
    return RequestResult("failed", orjson.dumps({"error": text, "category": category}))


def created(model: str) -> RequestResult:
    """Return the result of a create_model."""
    return RequestResult("done", orjson.dumps({"model_id": model, "type": "create_model"}))
