"""Site of a remote environment: its address, token, sessions, and last failure.

Invariants: a token is sent only to the address for which the service's configuration names it; a submission cannot add
one. Every connection failure is a ServiceUnreachable that names the address, so that the episode is played again. The
next episode connects anew, so a site that recovers is used again without intervention.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.env.backend import Call
from shared.errors import Busy, ConfigError, GivenUp, InputError, ServiceUnreachable, VolleyError
from shared.web.access import read_secret
from shared.web.tls import client_context
from volley_sandbox.backends.remote.address import RemoteAddress, read_address

CONNECT_S, _FORGET_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """Access to remote environments.

    Args:
        tokens: bearer tokens by origin (`https://host:port`).
        ca_file: certificate authorities for https; by default the system's.
        deadline_s: deadline of one call, in seconds.
    """

    tokens: Mapping[str, str] = field(repr=False)
    ca_file: Path | None
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RemoteContext:
    """Arguments of a remote environment's backend.

    `splits` and `has_demonstration` are the validation's findings; `folder` holds the files submitted with it.
    """

    name: str
    address: RemoteAddress
    access: RemoteAccess
    log: deque[str]
    splits: Mapping[str, int]
    has_demonstration: bool
    folder: Path | None


def open_access(tokens_file: Path | None, ca_file: Path | None, deadline_s: float) -> RemoteAccess:
    """Read the tokens.

    Args:
        tokens_file: a secret file with a line `URL TOKEN` for each server that needs one.

    Raises ConfigError.
    """
    tokens: dict[str, str] = {}
    lines = read_secret(tokens_file, _TOKENS_KEY).splitlines() if tokens_file is not None else ()
    for number, line in enumerate(lines, 1):
        url, _, token = line.strip().partition(" ")
        try:
            tokens[read_address(url).origin] = checked_token(token.strip())
        except (InputError, ValueError) as error:
            detail = f"{_TOKENS_KEY}: line {number} of {tokens_file}: {getattr(error, 'detail', error)}"
            raise ConfigError(detail, "write lines of URL TOKEN, for example http://10.0.0.7:8000 6c2f…") from error
    return RemoteAccess(tokens, ca_file, deadline_s)


def checked_token(token: str) -> str:
    """Return the token if it can be a header. Raises ValueError."""
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ValueError("the token must be printable ASCII characters, none of them blank")
    return token


_TOKENS_KEY = "services.env.remote_tokens_file"


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """Description of a remote environment after a test episode. It has no class."""

    protocol: str
    splits: Mapping[str, int]
    tools: Sequence[Mapping[str, Any]] = ()
    has_demonstration: bool = False
    entry: None = None
    agent: None = None


class RemoteSite:
    """One site.

    Args:
        max_sessions: sessions at once.
        log: failures of its episodes, the newest last.
    """

    def __init__(self, address: RemoteAddress, access: RemoteAccess, max_sessions: int, log: deque[str]) -> None:
        self.address, self.deadline_s, self.log = address, access.deadline_s, log
        self.trouble: str | None = None
        """Reason why the last attempt to reach it failed; None if it succeeded."""
        self._token, self._ca_file = access.tokens.get(address.origin), access.ca_file
        self._max_sessions, self._sessions = max_sessions, asyncio.Semaphore(max_sessions)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    @property
    def token(self) -> str | None:
        return self._token

    @property
    def tls(self) -> ssl.SSLContext | None:
        return client_context(self._ca_file) if self.address.secure else None

    async def enter(self) -> None:
        """Take one of the sessions, to be followed by `leave`. Raises Busy."""
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._sessions.acquire()
        except TimeoutError:
            raise Busy(
                f"{self.address}: all {self._max_sessions} sessions are in use",
                "set config.max_sessions to the server's number of sessions",
                retry_after_s=2.0,
            ) from None

    def leave(self) -> None:
        self._sessions.release()

    async def within[T](self, call: Call, work: Awaitable[T]) -> T:
        """Await `work` up to the deadline, then raise GivenUp."""
        try:
            async with asyncio.timeout(self.deadline_s):
                return await work
        except TimeoutError:
            detail = f"{self.address}: {call} took longer than {self.deadline_s:g} s"
            raise GivenUp(detail, "the episode is given up") from None

    def unreachable(self, what: str, error: BaseException) -> ServiceUnreachable:
        """Record a failed or broken connection and return its error.

        Args:
            what: purpose of the connection.
        """
        reason = f"{what}{reason_of(error)}"
        self._note(reason)
        return ServiceUnreachable(f"{self.address}: {reason}", "check that the server is running")

    def reached(self) -> None:
        self.trouble = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record whether the calls inside reached the site; for clients that name the address themselves."""
        try:
            yield
        except ServiceUnreachable as error:
            self._note(error.detail)
            raise
        self.reached()

    async def forget(self, call: Awaitable[object]) -> None:
        """Await a cleanup call and ignore its failure."""
        with suppress(VolleyError, TimeoutError):
            async with asyncio.timeout(_FORGET_S):
                await call

    def _note(self, reason: str) -> None:
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self.trouble = f"{self.address}: {reason} (since {at})" if self.trouble is None else self.trouble
        self.log.append(f"{at} {reason}")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Take one of the sessions, and return it if the block fails."""
        await self.enter()
        try:
            yield
        except BaseException:
            self.leave()
            raise


def reason_of(error: BaseException) -> str:
    """Reason of a connection failure in plain words, without the address."""
    if isinstance(error, TimeoutError):
        return "no connection within the timeout"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection can be made: {getattr(error, 'verify_message', None) or error.reason or error}"
    if isinstance(error, OSError):
        if error.errno == errno.ECONNREFUSED:
            return "nothing listens there"
        return error.strerror or str(error) or type(error).__name__
    return str(error)[:200] or type(error).__name__
