"""Client of a teacher: log-probabilities of given tokens.

It works with servers that have SGLang's /generate, or OpenAI's /completions with echo (or vLLM's `prompt_logprobs`).
Every result is checked: one finite log-probability per requested token, and the server's text of the token is ours;
anything else raises. Ids say nothing about a vocabulary: a server repeats those that it was given. Nothing is repeated
here: the caller has its own limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from shared.bounds import MAX_OBJECTS
from shared.clients.base import MALFORMED, HttpClient
from shared.clients.keys import without_key
from shared.errors import InputError, MalformedAnswer, RateLimited, TlsFailed, Unavailable, VolleyError
from shared.server_schema import TeacherServer
from shared.teacher_view import MOST_POSITIVE, TeacherLogprobs
from volley_algorithms.teachers.token_texts import is_same

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport

_TOKEN_OBJECTS = 24  # values per token in the longest kind of answer: id, text, rank and log-probability, each nested
_AWAY = (502, 503, 504)
_BY_ID = "token_id:"
_SHOWN = 40


class TeacherFailed(Unavailable):
    """The teacher did not answer."""

    title = "No answer of the teacher"


class TeacherAway(TeacherFailed):
    """The teacher does not answer, or reports that it is unavailable: the request has cost nothing."""

    title = "The teacher is away"


class TeacherUnusable(TeacherFailed):
    """The answer is not one log-probability per token: too many or few, NaN, infinite, positive."""

    title = "Unusable log-probabilities"


class TeacherRefused(InputError):
    """A retry cannot succeed: wrong key or model, another vocabulary, a context that is too short."""

    title = "The teacher refused"


class _TeacherAnswer(NamedTuple):
    """Log-probabilities, ids and texts of the requested tokens, in order; None where the answer has none."""

    logprobs: Sequence[Any]
    ids: Sequence[Any] | None = None
    texts: Sequence[Any] | None = None


class TeacherClient:
    """Client of a teacher, an async context manager.

    Args:
        key: the API key, sent as bearer token.
        text_of: decodes a token alone.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        server: TeacherServer,
        text_of: Callable[[int], str],
        *,
        key: str | None = None,
        ca_file: Path | None = None,
        transport: AsyncBaseTransport | None = None,
    ) -> None:
        self._server, self._text_of, self._key, self._stack = server, text_of, key, AsyncExitStack()
        self._has_compared = False
        self._client = HttpClient(
            server.url, token=key, timeout_s=server.timeout_s, ca_file=ca_file, transport=transport, as_json=True
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def logprobs(self, ids: np.ndarray, start: int) -> TeacherLogprobs:
        """Return float32 [T - start]: log-probabilities of ids[start:] given all tokens before.

        `ids` is int32 [T], 0 < start < T. Raises RateLimited, TeacherAway, TeacherFailed, TeacherUnusable,
        TeacherRefused.
        """
        given = [int(token) for token in ids]
        answer = await self._request_logprobs(given, start)
        if answer.ids is not None and [one if type(one) is int else None for one in answer.ids] != given[start:]:
            raise self._another_vocabulary("it returned other token ids than it was sent")
        made = self._checked(answer, len(given) - start)
        self._check_vocabulary(answer.texts or (), given[start:])
        return TeacherLogprobs(made)

    async def ready(self) -> None:
        """Check that the teacher answers.

        Raises TeacherAway if it does not answer or reports that it is unavailable; TeacherFailed or TeacherRefused for
        other errors.
        """
        try:
            reply = await self._client.exchange("GET", "/ready" if self._server.model is None else "/models")
        except VolleyError as error:
            raise self._translated(error) from error
        if reply.status in _AWAY:
            raise TeacherAway(f"{self._where}: HTTP {reply.status}")

    @property
    def _where(self) -> str:
        return f"the teacher ({self._server.url})"

    async def _request_logprobs(self, ids: list[int], start: int) -> _TeacherAnswer:
        of_openai = self._server.model is not None
        path, body = ("/completions", self._completion(ids)) if of_openai else ("/generate", _generation(ids, start))
        body = {k: v for k, v in {**body, **self._server.request}.items() if v is not None}
        try:
            answer = await self._client.post(path, body, max_objects=MAX_OBJECTS + _TOKEN_OBJECTS * len(ids))
            return _of_completion(answer, ids, start) if of_openai else _of_generation(answer, len(ids), start)
        except MALFORMED as error:
            raise TeacherUnusable(
                f"{self._where}: its answer has no log-probabilities of the given tokens",
                "it must return log-probabilities of a prompt: see docs/distillation.md",
            ) from error
        except VolleyError as error:
            raise self._translated(error) from error

    def _completion(self, ids: list[int]) -> dict[str, Any]:
        asked = {"model": self._server.model, "prompt": ids, "max_tokens": 1, "temperature": 1}
        return {**asked, "echo": True, "logprobs": 1}

    def _translated(self, error: VolleyError) -> VolleyError:
        detail, hint = f"{self._where}: {without_key(error.detail, self._key)}", without_key(error.hint, self._key)
        if isinstance(error, RateLimited):
            return RateLimited(detail, hint, error.retry_after_s)
        if isinstance(error, MalformedAnswer):
            return TeacherUnusable(detail, hint)
        if isinstance(error, InputError | TlsFailed):
            return TeacherRefused(detail, hint or "check services.orchestrator.teacher")
        if isinstance(error, Unavailable) and not isinstance(error.__cause__, TimeoutError):
            return TeacherAway(detail, hint, error.retry_after_s)
        return TeacherFailed(detail, hint)

    def _check_vocabulary(self, their_texts: Sequence[Any], ids: list[int]) -> None:
        """Raise TeacherRefused if a token differs in the teacher's vocabulary, or no token has a text.

        Raises TeacherUnusable if the texts prove nothing (only parts of characters), until one answer has shown our
        tokens.
        """
        texts = [x if isinstance(x, str) and not x.startswith(_BY_ID) else None for x in their_texts]
        if not any(text is not None for text in texts):
            raise TeacherRefused(
                f"{self._where} returns no texts of tokens, so its vocabulary cannot be compared",
                "use a server that loads its tokenizer, without return_tokens_as_token_ids",
            )
        if len(texts) != len(ids):
            raise TeacherUnusable(f"{self._where} returned {len(texts)} texts for {len(ids)} tokens")
        for token, text in zip(ids, texts, strict=True):
            ours = self._text_of(token)
            same = None if text is None else is_same(text, ours)
            if same is False:
                theirs = str(text)[:_SHOWN]
                raise self._another_vocabulary(f"token {token} is {theirs!r} there and {ours[:_SHOWN]!r} here")
            self._has_compared |= same is True
        if not self._has_compared:
            raise TeacherUnusable(f"{self._where} returned texts that do not show which tokens it has")

    def _another_vocabulary(self, why: str) -> TeacherRefused:
        return TeacherRefused(
            f"{self._where} has another vocabulary: {why}", "a teacher needs the tokenizer of the trained model"
        )

    def _checked(self, answer: _TeacherAnswer, n: int) -> np.ndarray:
        """Return the log-probabilities as float32. Raises TeacherUnusable."""
        if len(answer.logprobs) != n:
            raise TeacherUnusable(f"{self._where} returned {len(answer.logprobs)} log-probabilities for {n} tokens")
        try:
            with np.errstate(over="ignore"):  # overflows in float32
                made = np.array([_real(x) for x in answer.logprobs], np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise TeacherUnusable(f"{self._where} returned a log-probability that is not a number: {error}") from error
        if not np.isfinite(made).all():
            raise TeacherUnusable(f"{self._where} returned a log-probability that is NaN or infinite")
        if made.max() > MOST_POSITIVE:
            raise TeacherUnusable(f"{self._where} returned a positive log-probability, {made.max():g}")
        return made


def _real(x: Any) -> float:
    """Convert a number. Raises TypeError for booleans and text too, which Python would convert."""
    if isinstance(x, bool | str):
        raise TypeError(f"{type(x).__name__} {str(x)[:20]!r}")
    return float(x)


def _generation(ids: list[int], start: int) -> dict[str, Any]:
    """Return SGLang's request; it returns log-probabilities of the tokens after `logprob_start_len`."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "return_text_in_logprobs": True,
    }


def _of_generation(answer: Any, n: int, start: int) -> _TeacherAnswer:
    """Read rows [log-probability, id, text] from the token before `start` on, which has no log-probability."""
    rows = answer["meta_info"]["input_token_logprobs"]
    if len(rows) != n - start + 1:
        return _TeacherAnswer([row[0] for row in rows[1:]])
    rows = rows[1:]
    return _TeacherAnswer(
        [row[0] for row in rows], [row[1] for row in rows], [row[2] if len(row) > 2 else None for row in rows]
    )


def _of_completion(answer: Any, ids: list[int], start: int) -> _TeacherAnswer:
    """Read an echo, which may end with the one generated token, or vLLM's `prompt_logprobs`.

    An echo of any other length has extra tokens before ours.
    """
    choice = answer["choices"][0]
    if (by_position := choice.get("prompt_logprobs")) is not None:
        return _of_prompt(by_position, ids, start)
    echo, n = choice["logprobs"], len(ids)
    texts = echo.get("tokens")
    if len(echo["token_logprobs"]) not in (n, n + 1):
        return _TeacherAnswer(echo["token_logprobs"])
    return _TeacherAnswer(echo["token_logprobs"][start:n], texts=None if texts is None else texts[start:n])


def _of_prompt(by_position: Sequence[Mapping[str, Any]], ids: list[int], start: int) -> _TeacherAnswer:
    """Read vLLM's table of token ids for each position; it always contains the prompt's own token."""
    if len(by_position) != len(ids):
        return _TeacherAnswer(by_position[start:])
    places = list(zip(by_position[start:], ids[start:], strict=True))
    found = [token if str(token) in table else None for table, token in places]
    logprobs = [table.get(str(token)) for table, token in places]
    texts = [one.get("decoded_token") if isinstance(one, Mapping) else None for one in logprobs]
    return _TeacherAnswer([one["logprob"] if isinstance(one, Mapping) else one for one in logprobs], found, texts)
