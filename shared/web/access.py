"""Who may call what: roles, the bearer tokens that stand for them, and the role every route asks for.

Invariants: a route that declares no role asks for admin; where several declarations fit a path, the strictest counts; a
token is compared with every known one in constant time; no secret is in a `repr`, an error or a log.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from starlette.routing import compile_path

from shared.errors import ConfigError
from shared.services_schema import TokenFiles

MIN_TOKEN = 16
"""Characters of a token, at least."""
_MAX_SECRET = 2**16


class Role(IntEnum):
    """Each role includes those before it."""

    ANYONE = 0
    VIEWER = 1
    SERVICE = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


class AccessTokens:
    """The tokens a service knows its callers by."""

    def __init__(self, tokens: Mapping[Role, str]) -> None:
        self._tokens = dict(tokens)
        self._encoded = [(role, token.encode()) for role, token in tokens.items()]

    def __repr__(self) -> str:
        return f"Tokens({', '.join(map(str, self._tokens))})"

    def of(self, role: Role) -> str:
        """The token to call others with in that role: the least powerful one that has it."""
        return self._tokens[min(known for known in self._tokens if known >= role)]

    def role_of(self, authorization: bytes) -> Role | None:
        """The role of a request's Authorization header; None if it is no known token's. Every comparison is made.

        RFC 9110, 11.1 and 11.4: the scheme in any case, one or more spaces, the token.
        """
        scheme, _, rest = authorization.partition(b" ")
        given = rest.lstrip(b" ")
        if scheme.lower() != b"bearer":
            return None
        return max([role for role, token in self._encoded if hmac.compare_digest(given, token)], default=None)


class RoleTable:
    """The role of every request, from declarations like {"POST /episodes/{id}/step": Role.SERVICE}."""

    def __init__(self, declared: Mapping[str, Role]) -> None:
        rows: list[tuple[str, str, Role]] = []
        for key, role in declared.items():
            method, _, path = key.partition(" ")
            rows.append((method, path, role))
        self._patterns: dict[str, list[tuple[re.Pattern[str], Role]]] = {}
        for method, path, role in rows:
            if "{" in path:
                self._patterns.setdefault(method, []).append((compile_path(path)[0], role))
        exact = [row for row in rows if "{" not in row[1]]
        self._exact = {
            f"{method} {path}": max(role, self._by_pattern(method, path) or role) for method, path, role in exact
        }

    def role_for(self, method: str, path: str) -> Role | None:
        """None where nothing is declared."""
        exact = self._exact.get(f"{method} {path}")
        return self._by_pattern(method, path) if exact is None else exact

    def role_for_pattern(self, method: str, path: str) -> Role:
        """The role of every request for a path with `{names}`, whatever they are."""
        return self.role_for(method, path.replace("{", "").replace("}", "")) or Role.ADMIN

    def _by_pattern(self, method: str, path: str) -> Role | None:
        return max((role for regex, role in self._patterns.get(method, ()) if regex.match(path)), default=None)


def read_tokens(files: TokenFiles) -> AccessTokens | None:
    """All configured tokens, or None if there are none: everyone may then do everything. Raises ConfigError."""
    named = {role: getattr(files, str(role)) for role in (Role.VIEWER, Role.SERVICE, Role.ADMIN)}
    tokens = {role: read_token(path, _key(role)) for role, path in named.items() if path is not None}
    if len(set(tokens.values())) < len(tokens):
        raise ConfigError("services.token_files: two roles have the same token", "give each role a token of its own")
    return AccessTokens(tokens) if tokens else None


def token_for(files: TokenFiles, role: Role) -> str | None:
    """The token to call others with in that role, read from the one file it takes; None where none is configured.
    Raises ConfigError.
    """
    path = next(
        (path for known in Role if known >= role and (path := getattr(files, str(known), None)) is not None), None
    )
    return None if path is None else read_token(path, _key(role))


def _key(role: Role) -> str:
    return f"services.token_files.{role}"


def read_token(path: Path, key: str) -> str:
    """Raises ConfigError as `read_secret`, or if the file holds no token."""
    token = read_secret(path, key)
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{key}: {path} must hold {MIN_TOKEN} or more ASCII characters, none of them blank")
    return token


def read_secret(path: Path, key: str) -> str:
    """The one line of a secret file, which `key` of the configuration names.

    As OpenSSH does with private keys, a file of our own that group or others have any right to is refused; one that
    belongs to somebody else (a mounted secret, often root's and 0444) is guarded by whoever put it there.

    Raises:
        ConfigError: it cannot be read, or others can.
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_MAX_SECRET).strip()
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                hint = f"chmod 600 {path}" if _is_secret(secret) else "name a file that holds the secret alone"
                raise ConfigError(f"{key}: {path} has mode {mode}: not only its owner has access to this secret", hint)
            return secret
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"{key}: {path}: {reason}", f"create the file, or unset {key}") from error


def _is_secret(text: str) -> bool:
    """Whether it looks like one: a single line, or a private key."""
    return bool(text) and (text.isprintable() or text.startswith("-----BEGIN "))
