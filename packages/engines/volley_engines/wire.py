"""HTTP exchange with an inference server of another project: JSON, server-sent events, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import orjson

from services.rollout.engines.base import FinishReason, GenerateRequest, ScoredTokens, TopTokens
from services.rollout.engines.staged import CommitMode
from shared.clients.base import MALFORMED, HttpClient
from shared.clients.wires import HttpReply
from shared.errors import Forbidden, InputError, NotFound, RateLimited, Unauthorized, Unavailable
from shared.types import VersionSpan

ANSWER_S = 10.0
"""Longest answer to a question about the server's state, in seconds."""
GENERATE_S = 24 * 3600.0
SEEDS = 1 << 63
"""Seeds that the servers take are below; larger ones are reduced to their rest."""
_EVENT, _DONE = b"data:", b"[DONE]"
_MOST_DETAIL, _MOST_EVENT = 500, 2**26


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Sizes that a server reports, in tokens and requests; None where it reports none. `name` is kind and version."""

    name: str
    context_length: int | None
    max_total_tokens: int | None
    max_running_requests: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ServerAnswer:
    """Answer to a request: int32[n] ids, float32[n] log-probabilities.

    `spans` are None if the server names one `version` for the answer, or none.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    spans: tuple[VersionSpan, ...] | None = None
    version: str | None = None
    cached_tokens: int = 0
    top: TopTokens | None = None


type OnSampled = Callable[[np.ndarray, np.ndarray, TopTokens | None], None]
"""Receiver of tokens that arrived since its last call: ids, log-probabilities, most likely tokens."""


class ForeignServer(Protocol):
    """A kind of server. Every method may raise ServiceUnreachable, Unavailable, and InputError for a refusal."""

    async def facts(self) -> ServerFacts:
        """Return what the server is. Raises ConfigError if it was started without a switch that Volley needs."""
        ...

    async def version(self) -> str | None:
        """Return the weight version that the server names."""
        ...

    async def check_health(self) -> None: ...

    async def generate(self, name: str, request: GenerateRequest, on_sampled: OnSampled | None) -> ServerAnswer:
        """Sample; `name` identifies the request to `abort`."""
        ...

    async def score(self, ids: np.ndarray, top_logprobs: int) -> ScoredTokens: ...

    async def abort(self, names: Sequence[str]) -> None: ...

    async def pause(self, mode: CommitMode) -> None:
        """Stop decoding; `abort` ends running requests, which answer with the tokens they have."""
        ...

    async def resume(self) -> None: ...

    async def load(self, folder: str, version: str, mode: CommitMode) -> None:
        """Load a Hugging Face folder while decoding is paused. `in_place` keeps cached prefixes, the others do not."""
        ...

    async def flush_cache(self) -> None: ...


class ServerHttp:
    """Client of a server's JSON routes."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self.url = client.base_url

    async def call(self, method: str, path: str, body: Any = None, timeout_s: float = ANSWER_S) -> Any:
        """Return the JSON of the answer; None for an empty one or one that is not JSON.

        Raises ServiceUnreachable; NotFound, Forbidden, RateLimited or InputError for 4xx; Unavailable for 5xx.
        """
        return self._read(await self._client.exchange(method, path, body, timeout_s), f"{method} {path}")

    async def events(self, path: str, body: Any, on_event: Callable[[Any], None]) -> None:
        """POST, and call `on_event` with the JSON of every server-sent event. Raises as `call`, and what it raises."""
        rest = bytearray()

        def take(block: bytes) -> None:
            rest.extend(block)
            if len(rest) > _MOST_EVENT:
                raise self.wrong(path, "a server-sent event without an end")
            *lines, last = rest.split(b"\n")
            rest[:] = last
            for line in lines:
                data = line.strip()
                if data.startswith(_EVENT) and (value := data.removeprefix(_EVENT).strip()) != _DONE:
                    on_event(self.parsed(bytes(value), path))

        reply = await self._client.exchange_stream(path, body, take)
        if reply.status != 200:
            self._read(reply, f"POST {path}")
            raise self.wrong(path, f"status {reply.status}")

    def parsed(self, content: bytes, what: str) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise self.wrong(what, "content that is not JSON") from error

    def wrong(self, what: str, answer: object) -> Unavailable:
        """Make the error of an answer that cannot be used."""
        return Unavailable(
            f"the server at {self.url} answered {what} with {answer}", "is it of the kind rollout.engine.kind?"
        )

    def _read(self, reply: HttpReply, what: str) -> Any:
        is_json = "json" in reply.content_type
        if reply.status < 300:
            return self.parsed(reply.content, what) if is_json and reply.content else None
        detail = f"the server at {self.url} answered {what} with {reply.status}: {_detail(reply.content, is_json)}"
        match reply.status:
            case 401:
                raise Unauthorized(detail, "rollout.engine.api_key_file must hold the server's API key")
            case 403:
                raise Forbidden(detail)
            case 404 | 405:
                raise NotFound(detail)
            case 408 | 429:
                raise RateLimited(detail, retry_after_s=1.0)
            case status if status < 500:
                raise InputError(detail)
            case _:
                raise Unavailable(detail)


def _detail(content: bytes, is_json: bool) -> str:
    text = content.decode("utf-8", "replace")
    if is_json:
        try:
            found: Any = orjson.loads(content)
        except orjson.JSONDecodeError:
            found = None
        while isinstance(found, dict):
            given = cast(dict[str, Any], found)
            found = next((given[key] for key in ("error", "message", "detail") if given.get(key)), None)
        text = found if isinstance(found, str) else text
    return text.strip()[:_MOST_DETAIL] or "nothing"


def read[T](http: ServerHttp, what: str, made: Callable[[], T]) -> T:
    """Return `made()`, which reads an answer. Raises Unavailable if fields are missing, of another type or length."""
    try:
        return made()
    except MALFORMED as error:
        raise http.wrong(what, f"fields that cannot be read: {error!r}"[:_MOST_DETAIL]) from error


def token_ids(values: Any) -> np.ndarray:
    """Return int32[n]. Raises ValueError for anything but a list of ids."""
    if not isinstance(values, list) or any(type(one) is not int or not 0 <= one < 2**31 for one in values):
        raise ValueError("no list of token ids")
    return np.array(values, np.int32)


def logprobs(values: Sequence[Any]) -> np.ndarray:
    """Return float32[n]. Raises ValueError if one is not finite or above 0, but for rounding."""
    found = np.array(values, np.float32)
    if found.ndim != 1 or not np.isfinite(found).all() or (found > 1e-3).any():
        raise ValueError("a log-probability is not a number up to 0")
    return found


def spans(values: Any, n_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of an answer with n tokens, without empty ones. Raises ValueError if they leave a gap."""
    found = [VersionSpan(str(one["version"]), int(one["start"]), int(one["end"])) for one in values]
    kept = tuple(one for one in found if one.end > one.start)
    ends = [0, *(one.end for one in kept)]
    if ends[:-1] != [one.start for one in kept] or ends[-1] != n_tokens:
        raise ValueError(f"weight versions of {ends[-1]} tokens for {n_tokens}")
    return kept


def finish(kind: Any, ids: np.ndarray, matched: Any = None, message: Any = None) -> FinishReason:
    """Return the reason of an answer's end. Raises ValueError for one that is not known."""
    match kind:
        case "stop":
            found = matched if type(matched) is int else int(ids[-1])
            return FinishReason("stop", matched=found)
        case "length":
            return FinishReason("length", length=len(ids))
        case "abort":
            return FinishReason("abort", message=str(message or "the server ended the request"))
        case _:
            raise ValueError(f"finish reason {kind!r}")


def top_tokens(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> TopTokens:
    """Build the most likely tokens of n positions from rows of (id, log-probability), the likeliest first.

    Raises ValueError for a row of fewer than k.
    """
    best = [sorted(row, key=lambda one: -one[1])[:k] for row in rows]
    if any(len(row) != k for row in best):
        raise ValueError(f"fewer than {k} of the most likely tokens at a position")
    n = len(best)
    ids = np.array([[one[0] for one in row] for row in best], np.int32).reshape(n, k)
    return TopTokens(ids, np.array([[one[1] for one in row] for row in best], np.float32).reshape(n, k))
