"""Clients of reward servers, with bounds on concurrency, requests and tokens.

Invariants: of equal questions one is sent; a sent question is awaited and its answer stored even if no caller waits any
more, unless the service ends first; a call waits at most WAIT_S, then the caller is told to repeat it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import orjson

from shared.clients.keys import read_key, without_key
from shared.errors import (
    MAX_RETRY_AFTER_S,
    Busy,
    Conflict,
    InputError,
    JudgementUnusable,
    MalformedAnswer,
    RewardFailed,
    RewardRefused,
    Unavailable,
    VolleyError,
)
from shared.process import telemetry
from shared.retry import retry
from shared.reward_schema import RewardServer
from volley_sandbox.rewards.store import RewardStore

if TYPE_CHECKING:
    from shared.clients.base import HttpClient

WAIT_S = 5.0
_AGAIN_S = 0.2
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_MOST_TOLD = 200
_log = telemetry.Log("rewards")
_REQUESTS = telemetry.Counter(
    "volley_reward_requests_total",
    "Questions to judges and reward services, by what became of them (answered, kept: known from before, failed)",
    ["server", "outcome"],
    registry=telemetry.REGISTRY,
)
_TOKENS = telemetry.Counter(
    "volley_reward_tokens_total", "Tokens that judges have used", ["server"], registry=telemetry.REGISTRY
)


class Answer(NamedTuple):
    """Stored part of an answer, its tokens (None if the server does not report them), and why it is unusable.

    An unusable answer is not stored.
    """

    judgement: str
    tokens: int | None
    unusable: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A POST of `body` to `path` of the server.

    `read` extracts the stored part of the answer, and raises ValueError for a malformed one. `version` distinguishes
    questions that are otherwise equal.
    """

    path: str
    body: Any
    read: Callable[[Any], Answer]
    version: str = ""

    def key(self, server: str) -> bytes:
        text = orjson.dumps([server, self.version, self.path, self.body], option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=32).digest()


class AskedServer:
    """One server; an async context manager. Raises ConfigError if its token file is unusable.

    Args:
        key: of its settings in the configuration (default: in services.env.reward_servers).
        what: noun in errors.
    """

    def __init__(
        self,
        name: str,
        settings: RewardServer,
        store: RewardStore,
        ca_file: Path | None = None,
        key: str = "",
        what: str = "reward server",
    ) -> None:
        self.name, self._settings, self._store = name, settings, store
        self._key, self._shown = key or f"services.env.reward_servers.{name}", f"the {what} {name}"
        self._token = read_key(settings.token_file, f"{self._key}.token_file")
        self._reports_tokens = True
        self._ca_file = ca_file
        self._client: HttpClient | None = None
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._asking: dict[bytes, asyncio.Future[str]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        from shared.clients.base import HttpClient  # imports aiohttp, which a service without judges does not need

        settings = self._settings
        client = HttpClient(
            settings.url, token=self._token, timeout_s=settings.timeout_s, ca_file=self._ca_file, as_json=True
        )
        self._client = await self._stack.enter_async_context(client)
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._give_up)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def ask(self, question: Question) -> str:
        """Ask the server, or return its stored answer.

        Raises Busy (repeat), RewardFailed, RewardRefused, StorageUnavailable.
        """
        try:
            key = question.key(self.name)
        except TypeError as error:
            detail = f"{self._shown} cannot receive this episode: {error}"
            raise RewardRefused(detail, "its messages and tool calls must be JSON with numbers of 64 bits") from error
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.get_running_loop().create_future()
            task = self._tasks.create_task(self._answer(key, question, asking), name=f"reward-{self.name}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.wait([asking], timeout=WAIT_S)
        if not asking.done():
            raise Busy(f"{self._shown} has not answered yet", "ask again", retry_after_s=_AGAIN_S)
        return asking.result()

    async def _answer(self, key: bytes, question: Question, asking: asyncio.Future[str]) -> None:
        """Task of one question; errors are passed to the waiting callers."""
        try:
            judgement = await self._answered(key, question)
            asking.set_result(judgement)
        except VolleyError as error:
            self._fail(asking, error)
        except Exception as error:  # noqa: BLE001 - a defect here fails one question, never the service
            _log.exception("a question to a reward server failed", server=self.name)
            detail = f"the answer of {self._shown} could not be used: {type(error).__name__}: {error}"
            self._fail(asking, RewardFailed(detail))
        finally:
            del self._asking[key]
            asking.cancel()

    def _fail(self, asking: asyncio.Future[str], error: VolleyError) -> None:
        _REQUESTS.labels(self.name, "failed").inc()
        asking.set_exception(error)
        asking.exception()  # mark as retrieved, because there may be no caller left

    async def _answered(self, key: bytes, question: Question) -> str:
        known = await asyncio.to_thread(self._store.find, key)
        if known is not None:
            _REQUESTS.labels(self.name, "kept").inc()
            return known
        async with self._places:
            judgement, tokens, unusable = await retry(
                lambda: self._sent(question), attempts=self._settings.attempts, cap_s=MAX_RETRY_AFTER_S
            )
        _TOKENS.labels(self.name).inc(tokens or 0)
        self._reports_tokens = self._reports_tokens and tokens is not None
        if unusable:
            await asyncio.to_thread(self._store.count_tokens, self.name, tokens or 0)
            raise JudgementUnusable(f"the answer of {self._shown} {unusable}: …{judgement[-_MOST_TOLD:]}")
        judgement = await asyncio.to_thread(self._store.keep, key, self.name, judgement, tokens or 0)
        _REQUESTS.labels(self.name, "answered").inc()
        self._check_token_budget()
        return judgement

    def _check_token_budget(self) -> None:
        """Raises RewardRefused if a token budget cannot be enforced."""
        if not self._reports_tokens and self._settings.max_tokens is not None:
            detail = f"{self._shown} does not report used tokens, so max_tokens cannot be enforced"
            raise RewardRefused(detail, f"set {self._key}.max_requests instead")

    async def _sent(self, question: Question) -> Answer:
        """Make one attempt, which counts toward the budget. Raises RewardFailed, RewardRefused."""
        limits = self._settings
        self._check_token_budget()
        used_up = await asyncio.to_thread(self._store.count_request, self.name, limits.max_requests, limits.max_tokens)
        if used_up is not None:
            detail = f"the budget of {self._shown} is used up: {used_up}"
            raise RewardRefused(detail, f"raise {self._key}.{used_up.partition('=')[0]}")
        assert self._client is not None, "enter the server first"
        where = f"{self._shown} ({limits.url})"
        try:
            answer = await self._client.post(question.path, question.body)
            if answer is None:
                raise RewardFailed(f"{where}: its answer is empty")
            if isinstance(answer, dict) and answer.get("error"):
                raise RewardFailed(
                    f"{where}: an error as answer: {self._without_token(str(answer['error']))[:_MOST_TOLD]}"
                )
            return question.read(answer)
        except (MalformedAnswer, Conflict) as error:
            raise RewardFailed(
                f"{where}: {self._without_token(error.detail)}", self._without_token(error.hint)
            ) from error
        except InputError as error:
            detail = f"{where} refuses: {self._without_token(error.detail)}"
            raise RewardRefused(detail, f"check url, model and token_file of {self._key}") from error
        except RewardFailed:
            raise
        except VolleyError as error:
            raise RewardFailed(
                f"{where}: {self._without_token(error.detail)}", self._without_token(error.hint), _after_s(error)
            ) from error
        except _MALFORMED as error:
            detail = f"{where}: {self._without_token(str(error))}"
            raise RewardRefused(detail, "check that url is the address of such a server") from error

    def _without_token(self, text: str) -> str:
        return without_key(text, self._token)

    def _give_up(self) -> None:
        """Cancel pending questions when the service ends."""
        for task in self._running:
            task.cancel()


def _after_s(error: VolleyError) -> float:
    return error.retry_after_s if isinstance(error, Unavailable) else 1.0
