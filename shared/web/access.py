"""Access control: roles, their bearer tokens, and the role that every route requires.

Invariants: a route without a declared role requires admin; if several declarations match a path, the strictest counts;
a token is compared with every known one in constant time; no secret is in a `repr`, an error or a log.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from shared.errors import ConfigError
from shared.services_schema import TokenFiles
from shared.visible import quoted

MIN_TOKEN = 16
"""Shortest token, in characters."""
_MAX_SECRET = 2**16


class Role(IntEnum):
    """Roles of callers; each includes those before it."""

    ANYONE = 0
    VIEWER = 1
    SERVICE = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


class AccessTokens:
    """Tokens of a service's callers."""

    def __init__(self, tokens: Mapping[Role, str]) -> None:
        self._tokens = dict(tokens)
        self._encoded = [(role, token.encode()) for role, token in tokens.items()]

    def __repr__(self) -> str:
        return f"Tokens({', '.join(map(str, self._tokens))})"

    def of(self, role: Role) -> str:
        """Return the token for calling others in a role: that of the least powerful role that includes it."""
        return self._tokens[min(holder for holder in self._tokens if holder >= role)]

    def role_of(self, authorization: bytes) -> Role | None:
        """Return the role of a request's Authorization header; None for an unknown token. Compares with every token.

        RFC 9110, 11.1 and 11.4: the scheme in any case, one or more spaces, the token.
        """
        scheme, _, rest = authorization.partition(b" ")
        given = rest.lstrip(b" ")
        if scheme.lower() != b"bearer":
            return None
        return max([role for role, token in self._encoded if hmac.compare_digest(given, token)], default=None)


class RoleTable:
    """Role of every request, from declarations like {"POST /episodes/{id}/step": Role.SERVICE}."""

    def __init__(self, declared: Mapping[str, Role]) -> None:
        from starlette.routing import compile_path  # of services only: the client reads tokens with this module

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
        """Return the role for a request; None without a declaration."""
        exact = self._exact.get(f"{method} {path}")
        return self._by_pattern(method, path) if exact is None else exact

    def role_for_pattern(self, method: str, path: str) -> Role:
        """Return the role for a path with `{names}`, for all values of the names."""
        return self.role_for(method, path.replace("{", "").replace("}", "")) or Role.ADMIN

    def _by_pattern(self, method: str, path: str) -> Role | None:
        return max((role for regex, role in self._patterns.get(method, ()) if regex.match(path)), default=None)


def read_tokens(files: TokenFiles) -> AccessTokens | None:
    """Read all configured tokens; None if there are none: every caller then has full access. Raises ConfigError."""
    named = {role: getattr(files, str(role)) for role in (Role.VIEWER, Role.SERVICE, Role.ADMIN)}
    tokens = {role: read_token(path, _key(role)) for role, path in named.items() if path is not None}
    if len(set(tokens.values())) < len(tokens):
        raise ConfigError("services.token_files: two roles have the same token", "give each role its own token")
    return AccessTokens(tokens) if tokens else None


def token_for(files: TokenFiles, role: Role) -> str | None:
    """Read the token for calling others in a role; None if none is configured. Raises ConfigError."""
    path = next(
        (path for known in Role if known >= role and (path := getattr(files, str(known), None)) is not None), None
    )
    return None if path is None else read_token(path, _key(role))


def _key(role: Role) -> str:
    return f"services.token_files.{role}"


def read_token(path: Path, key: str) -> str:
    """Read a token. Raises ConfigError as `read_secret`, or if the file holds no token."""
    token = read_secret(path, key)
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{key}: {path} must hold {MIN_TOKEN} or more ASCII characters, without blanks")
    return token


def read_secret(path: Path, key: str) -> str:
    """Read the one line of a secret file, which `key` of the configuration names.

    A file owned by this user that its group or others can access is refused, as OpenSSH refuses such private keys. A
    file of another owner (a mounted secret, often root's and 0444) is accepted: its owner is responsible for it.

    Raises:
        ConfigError: the file cannot be read, or others can read it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_MAX_SECRET).strip()
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                hint = f"chmod 600 {quoted(path)}" if _is_secret(secret) else "name a file that holds only the secret"
                raise ConfigError(f"{key}: {path} has mode {mode}: not only its owner has access to this secret", hint)
            return secret
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"{key}: {path}: {reason}", f"create the file, or unset {key}") from error


def _is_secret(text: str) -> bool:
    """True if the text looks like a secret: a single line, or a private key."""
    return bool(text) and (text.isprintable() or text.startswith("-----BEGIN "))
