"""The connection to Redis or Valkey: time-outs, no hidden retries, and the translation of its errors.

Retries are the caller's: a client that repeats commands by itself would hide the lost replies that the queue must know
of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis.exceptions as foreign
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.errors import ConfigError, Fenced, QueueUnavailable
from shared.process.descriptors import HINT, exhausted
from shared.web.access import read_secret

CONNECT_TIMEOUT_S = 3.0
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_MS = 2000  # the longest a command may block, far below the socket time-out
_CLOSED = (
    "the handler is closed"  # uvloop says so, with a RuntimeError, where asyncio would notice a reset when it reads
)
_TRANSIENT = ("OOM", "MISCONF", "READONLY", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS")


def connect(url: str, password_file: Path | None = None, ca_file: Path | None = None) -> Redis:
    """A client for `redis://[:password@]host:port/db` (or `rediss://`, `unix://`); it connects with the first command.

    Args:
        url: where the server is.
        password_file: a file with the password alone, readable by its owner only; it replaces a password in the URL.
        ca_file: who vouches for a server at `rediss://` (default: the system's authorities).

    Raises:
        ConfigError: the URL or the password file cannot be used.
    """
    secret = {"password": read_secret(password_file, "services.redis_password_file")} if password_file else {}
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
    client.connection_pool.connection_kwargs.update(secret | trust)
    return client


@contextmanager
def translated() -> Iterator[None]:
    """Maps errors of the client and the server to the project's own.

    Raises:
        QueueUnavailable: the server did not answer, or cannot take writes now.
        Fenced: the consumer group is gone, so another trainer has begun (or the server was wiped).
        ConfigError: the server refuses the password or the user.
    """
    try:
        yield
    except (foreign.AuthenticationError, foreign.AuthorizationError, foreign.NoPermissionError) as error:
        raise ConfigError(f"Redis refuses this client: {error}", "check services.redis_url and its password") from error
    except (foreign.ConnectionError, foreign.TimeoutError, OSError) as error:
        if (reason := exhausted(error)) is not None:
            raise QueueUnavailable(f"Redis was not asked: {reason}", HINT) from error
        raise QueueUnavailable(f"Redis did not answer: {_reason(error)}", "is the server running?") from error
    except RuntimeError as error:
        if not str(error).endswith(_CLOSED):
            raise
        raise QueueUnavailable(f"the connection to Redis broke: {error}", "is the server running?") from error
    except foreign.ResponseError as error:
        raise _from_server(error) from error


async def command(redis: Redis, *args: str | int | bytes) -> Any:
    """Runs one command; its answer as redis-py parses it. Raises as `translated`."""
    with translated():
        return await redis.execute_command(*args)


async def transaction(redis: Redis, *commands: Sequence[str | int | bytes]) -> list[Any]:
    """Runs several commands with none of another client in between; their answers. Raises as `translated`."""
    with translated():
        async with redis.pipeline(transaction=True) as pipe:
            for args in commands:
                pipe.execute_command(*args)
            return await pipe.execute()


def _from_server(error: foreign.ResponseError) -> Exception:
    """By the server's code; in a transaction the client puts the name of the command before it."""
    text = str(error).rpartition(" caused error: ")[2].strip("(',\")")
    code = text.partition(" ")[0]
    if code in ("NOGROUP", "UNBLOCKED"):
        return Fenced("the consumer group of this trainer is gone", "another trainer has begun, or Redis was wiped")
    if code in _TRANSIENT or isinstance(error, foreign.OutOfMemoryError | foreign.ReadOnlyError):
        return QueueUnavailable(
            f"Redis cannot take this command now: {text}", "look at its memory limit, disk and role"
        )
    return error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
