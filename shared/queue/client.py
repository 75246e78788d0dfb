"""Connection to Redis or Valkey: time-outs, no hidden retries, and translated errors.

Callers retry: a client that repeats commands by itself would hide lost replies, which the queue must know of. Every new
connection reads the password file again, so the password may change while a client is in use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import redis.exceptions as foreign
from redis.asyncio import Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from shared.clients.dialing import open_socket
from shared.errors import ConfigError, Fenced, QueueUnavailable
from shared.process.descriptors import HINT, exhausted
from shared.web.access import read_secret

CONNECT_TIMEOUT_S = 3.0
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_MS = 2000  # the longest a command may block, far below the socket time-out
_CLOSED = "the handler is closed"  # uvloop's RuntimeError where asyncio would report a reset on the next read
REFUSED_S = 20.0
"""How long a service retries while Redis refuses its password, in seconds: the password may be changing."""
_TRANSIENT = ("OOM", "MISCONF", "READONLY", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS")
_REFUSALS = (foreign.AuthenticationError, foreign.AuthorizationError, foreign.NoPermissionError)


class _Secret(CredentialProvider):
    """Password read from its file for each connection; the last one read if the file is gone."""

    def __init__(self, path: Path, user: str | None) -> None:
        self._path, self._user = path, user
        self._password = self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        with suppress(ConfigError):
            self._password = self._read()
        return (self._password,) if self._user is None else (self._user, self._password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()

    def _read(self) -> str:
        return read_secret(self._path, "services.redis_password_file")


class _Dialing(Connection):
    """Connection to the first address of the host that answers; redis-py would try them one after another."""

    async def _connect(self) -> None:
        self._dialed = await open_socket(self.host, self.port, CONNECT_TIMEOUT_S)
        try:
            await super()._connect()
        except BaseException:
            self._dialed.close()
            raise

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {"sock": self._dialed}


class _DialingTls(_Dialing, SSLConnection):
    """The same with TLS."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {"sock": self._dialed, "ssl": self.ssl_context.get(), "server_hostname": self.host}


@dataclass
class _RefusalTimer:
    """How long a client's refusals are tolerated, and when they started, by the monotonic clock."""

    refused_s: float
    since: float | None = None

    def is_over(self) -> bool:
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        return now - self.since >= self.refused_s


_refusals = WeakKeyDictionary[Redis, _RefusalTimer]()


def connect(
    url: str, password_file: Path | None = None, ca_file: Path | None = None, *, refused_s: float = 0.0
) -> Redis:
    """Return a client for `redis://[:password@]host:port/db`, `rediss://` or `unix://`.

    It connects with its first command.

    Args:
        url: address of the server.
        password_file: a file with only the password, readable by its owner only; it replaces a password in the URL.
        ca_file: certificate authorities for `rediss://` (default: the system's).
        refused_s: how long a refused password counts as `QueueUnavailable`, in seconds; after that it is a ConfigError.

    Raises:
        ConfigError: the URL or the password file cannot be used.
    """
    trust = {"ssl_ca_certs": str(ca_file)} if ca_file and url.startswith("rediss:") else {}
    try:
        client = Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError("the Redis URL is malformed", "expected redis://host:port/db") from error
    pool = client.connection_pool
    if pool.connection_class in (Connection, SSLConnection):  # not a Unix socket
        pool.connection_class = _DialingTls if pool.connection_class is SSLConnection else _Dialing
    kwargs = pool.connection_kwargs
    kwargs.update(trust)
    if password_file:
        kwargs.pop("password", None)
        kwargs["credential_provider"] = _Secret(password_file, kwargs.pop("username", None))
    _refusals[client] = _RefusalTimer(refused_s)
    return client


@contextmanager
def translated(redis: Redis) -> Iterator[None]:
    """Translate errors of the client and the server.

    Raises:
        QueueUnavailable: the server did not answer, or cannot run this command now.
        Fenced: the consumer group is gone, so another trainer has started (or the server was wiped).
        ConfigError: the server has refused the password or the user for longer than `refused_s` of `connect`.
    """
    refusals = _refusals.setdefault(redis, _RefusalTimer(0.0))
    try:
        yield
    except _REFUSALS as error:
        message, hint = f"Redis refuses this client: {error}", "check services.redis_url and its password"
        raise (ConfigError if refusals.is_over() else QueueUnavailable)(message, hint) from error
    except (foreign.ConnectionError, foreign.TimeoutError, OSError) as error:
        if (reason := exhausted(error)) is not None:
            raise QueueUnavailable(f"no connection to Redis was opened: {reason}", HINT) from error
        raise QueueUnavailable(f"Redis did not answer: {_reason(error)}", "is the server running?") from error
    except RuntimeError as error:
        if not str(error).endswith(_CLOSED):
            raise
        raise QueueUnavailable(f"the connection to Redis broke: {error}", "is the server running?") from error
    except foreign.ResponseError as error:
        raise _from_server(error) from error
    refusals.since = None


async def command(redis: Redis, *args: str | int | bytes) -> Any:
    """Run one command; return its answer as redis-py parses it. Raises as `translated`."""
    with translated(redis):
        return await redis.execute_command(*args)


async def transaction(redis: Redis, *commands: Sequence[str | int | bytes]) -> list[Any]:
    """Run several commands atomically; return their answers. Raises as `translated`."""
    with translated(redis):
        async with redis.pipeline(transaction=True) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            return await pipe.execute()


def _from_server(error: foreign.ResponseError) -> Exception:
    """Translate by the server's code.

    redis-py cuts the code off errors that it knows, and in a transaction puts the command's name before it.
    """
    text = str(error).rpartition(" caused error: ")[2].strip("(',\")")
    code = error.status_code or text.partition(" ")[0]
    if code in ("NOGROUP", "UNBLOCKED"):
        return Fenced("the consumer group of this trainer is gone", "another trainer has started, or Redis was wiped")
    if code in _TRANSIENT:
        return QueueUnavailable(
            f"Redis cannot run this command now: {code} {text.removeprefix(f'{code} ')}",
            "check its memory limit, disk and role",
        )
    if code == "WRONGTYPE":
        return QueueUnavailable(f"a key of this run is damaged: {text}", "the next trainer restores it")
    if code == "DENIED":
        return ConfigError(f"Redis refuses this client: {text}", "check services.redis_url and its password")
    return error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
