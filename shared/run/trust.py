"""Marks of run folders whose addresses and paths this user's supervisor wrote.

A run's configuration names programs, addresses, files and tokens. A folder that came from somebody else may name any
file of the reader and any address to send it to, so a command that only reads a folder uses them if the folder bears
the mark of this user, or the user says `--trust`.

The mark is a MAC over the files that name them, by a key in the user's own state folder: a copied or moved run keeps
it, a changed one loses it, and no folder brings it along.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.run.folder import RunFolder

_MARK = "written_by"
_MOST_BYTES = 2**20
_KEY_BYTES = 32


_accepted: set[str] = set()
"""Folders that this process made, or that its user trusts by name."""


def accept(folder: RunFolder) -> None:
    """Trusts the folder in this process: its user said so, or the process has written it."""
    _accepted.add(os.path.realpath(folder.path))


def mark(folder: RunFolder) -> None:
    """Says that this user's supervisor wrote the folder's configuration. Best effort: without a home there is no key,
    and later readers need `--trust`.
    """
    accept(folder)
    with suppress(OSError, RuntimeError):
        found = _mac(folder, _key(make=True))
        folder.secrets.mkdir(mode=0o700, exist_ok=True)
        draft = folder.secrets / f".{_MARK}.tmp"
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(found)
        draft.replace(folder.secrets / _MARK)


def is_own(folder: RunFolder) -> bool:
    """Whether this user's supervisor wrote the configuration and addresses that the folder holds now, or the user
    trusts it.
    """
    if is_accepted(folder):
        return True
    with suppress(OSError, RuntimeError):
        if any(path.is_symlink() for path in (folder.secrets, folder.secrets / _MARK, *_marked(folder))):
            return False
        said = read_file(folder.secrets / _MARK, _MOST_BYTES)
        return hmac.compare_digest(said, _mac(folder, _key(make=False)).encode())
    return False


def is_accepted(folder: RunFolder) -> bool:
    """Whether this process wrote the folder, or its user trusts it by name."""
    return os.path.realpath(folder.path) in _accepted


def check(folder: RunFolder) -> None:
    """Raises ConfigError unless the folder may name files, addresses and programs to use."""
    if not is_own(folder):
        raise ConfigError(
            f"no `volley up` of this user wrote the configuration of {folder.path}: the files, addresses and programs "
            "that it names are not used",
            "if the folder is yours, add --trust",
        )


def _marked(folder: RunFolder) -> tuple[Path, ...]:
    return folder.config, folder.services, folder.processes


def _mac(folder: RunFolder, key: bytes) -> str:
    """Raises OSError."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    for path in _marked(folder):
        try:
            text = read_file(path, _MOST_BYTES)
        except FileNotFoundError:
            found.update(b"-")
        else:
            found.update(b"+%d\n" % len(text) + text)
    return found.hexdigest()


def _key(*, make: bool) -> bytes:
    """Raises OSError or RuntimeError: there is no home, or no key in it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(state) if os.path.isabs(state) else Path.home() / ".local/state") / "volley" / "key"
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(draft, path)  # whole or not at all, and never over another one
        finally:
            draft.unlink(missing_ok=True)
    key = read_file(path, _KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is no key")
    return key
