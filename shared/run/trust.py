"""Mark run folders whose addresses and paths this user's supervisor wrote.

A run's configuration names programs, addresses, files and tokens. A folder from another person may name any file of the
reader and any address to send it to. So a command that only reads a folder uses them only if the folder has this user's
mark, or the user says `--trust`.

The mark is a MAC over the files that name them, with a key in the user's own state folder: a copied or moved run keeps
it, a changed one loses it, and no folder can bring its own.
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
"""Folders that this process made, or that its user trusts by name; runs in them are trusted too."""


def accept(folder: RunFolder) -> None:
    """Trust the folder in this process: the user asked for it, or the process wrote the folder."""
    _accepted.add(os.path.realpath(folder.path))


def mark(folder: RunFolder) -> None:
    """Mark the folder's configuration as written by this user's supervisor.

    Best effort: without a home directory there is no key, and later readers need `--trust`.
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
    """True if this user's supervisor wrote the folder's present configuration and addresses, or the user trusts it."""
    if is_accepted(folder):
        return True
    with suppress(OSError, RuntimeError):
        if any(path.is_symlink() for path in (folder.secrets, folder.secrets / _MARK, *_marked(folder))):
            return False
        found = read_file(folder.secrets / _MARK, _MOST_BYTES)
        return hmac.compare_digest(found, _mac(folder, _key(make=False)).encode())
    return False


def is_accepted(folder: RunFolder) -> bool:
    """True if this process wrote the folder, or its user trusts it, or the one that it lies in, by name."""
    path = os.path.realpath(folder.path)
    return not _accepted.isdisjoint((path, os.path.dirname(path)))


def check(folder: RunFolder) -> None:
    """Raise ConfigError unless the folder may name files, addresses and programs to use."""
    if not is_own(folder):
        raise ConfigError(
            f"the configuration of {folder.path} was not written by a `volley up` of this user: the files, addresses "
            "and programs that it names are not used",
            "if the folder is yours, add --trust",
        )


def _marked(folder: RunFolder) -> tuple[Path, ...]:
    return folder.config, folder.services, folder.processes


def _mac(folder: RunFolder, key: bytes) -> str:
    """Return the MAC of the marked files. Raises OSError."""
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
    """Return the user's key. Raises OSError or RuntimeError if there is no home directory, or no key in it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(state) if os.path.isabs(state) else Path.home() / ".local/state") / "volley" / "key"
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(draft, path)  # atomic, and never replaces another key
        finally:
            draft.unlink(missing_ok=True)
    key = read_file(path, _KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is not a key")
    return key
