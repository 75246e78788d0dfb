"""What is made anew before a task is judged: of all that was done in a sandbox, the tests find the folders that they
are to judge, and nothing else.

Nothing may run meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from values import Refused

_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - of a root of its own
_NOT_THE_TASKS = ("/proc", "/dev")
_CONFIGURATION = "/etc"  # which lies in the sandbox's root, and nobody in it can write
_MAX_DEPTH, _MAX_PATH = 200, 3800
"""Folders in one another, and bytes of their path; what lies deeper is moved away."""
_MAX_LINKS, _MAX_STEPS = 40, 50_000
"""Links that one link may lead through, as the kernel has it; parts of paths that are looked at, all links together."""


def renew(paths: list[str], kept: list[str], workdir: str) -> None:
    """Leaves of what was made here what lies at and below `kept`, and makes each of `paths` a new and empty folder.

    Args:
        kept: absolute paths; with "/" all is left but temporary files.
        workdir: becomes a folder if it is none.

    Links in `kept` that lead nowhere, through `paths`, /proc or /dev, or to what is neither below `kept` nor the
    machine's, are removed: what they show would be the tests' own. Of more links than can be followed in a bounded time
    none is kept.

    Invariant: where it returns, no part of one of `paths` or of `workdir` is a link, and the last part of each of
    `paths` was made by mkdir here; the name that something is moved to is one that nobody could know (rename does
    nothing where both names are links to one file). Raises Refused.
    """
    try:
        for top in _TEMPORARY if "/" in kept else ["/"]:
            _clear(top, set(kept), {above for path in kept for above in _above(path)})
        for path in paths:
            _open_folder(os.path.dirname(path))
            _move_away(path)
            os.mkdir(path, 0o755)
        _open_folder(workdir)
        links = _Links({*paths, *_NOT_THE_TASKS} - {*kept}, kept)
        for path in kept:
            if not any(above in kept for above in _above(path)):
                links.remove(path)
    except OSError as error:
        raise Refused(f"{error.filename or 'a folder'} cannot be made new: {error.strerror}") from None


def _above(path: str) -> list[str]:
    """The folders that a path lies in, "/" the last."""
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


def _clear(folder: str, kept: set[str], above: set[str]) -> None:
    """Moves away what is this user's in a folder and in the system's folders below it. Raises OSError."""
    device, user = os.lstat("/").st_dev, os.geteuid()
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        found = os.lstat(path)
        if path in kept or found.st_dev != device:
            continue
        if found.st_uid == user and path not in above:
            _move_away(path)
        elif found.st_uid == user:
            _open_folder(path)
            _clear(path, kept, above)
        elif stat.S_ISDIR(found.st_mode):
            _clear(path, kept, above)


def _open_folder(path: str) -> None:
    """A folder of this user below such folders: the one that is there, else a new one. Raises OSError."""
    if path == "/":  # which is root's and sticky
        return
    _open_folder(os.path.dirname(path))
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            os.chmod(path, 0o755)  # noqa: S103 - as mkdir makes it
            return
        if stat.S_ISDIR(found.st_mode) and found.st_uid == 0:  # the system's, as /root
            return
    _move_away(path)
    os.mkdir(path, 0o755)


def _move_away(path: str) -> None:
    """To where nobody looks into it. Raises OSError, also where something is there still."""
    with contextlib.suppress(FileNotFoundError):
        mode, away = os.lstat(path).st_mode, f"/.removed-{os.urandom(16).hex()}"
        if stat.S_ISDIR(mode):
            os.chmod(path, 0o700)  # one that may not be written cannot get another parent
            os.rename(path, away)
            os.chmod(away, 0)
        else:  # which may have another name where it stays, and one mode for both
            os.unlink(path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "it cannot be moved away", path)


class _Links:
    """Args: out: paths through which no link may lead; kept: where it may end, beside what is the machine's."""

    def __init__(self, out: set[str], kept: list[str]) -> None:
        self._out, self._kept, self._left = out, kept, _MAX_STEPS
        self._device, self._user = os.lstat("/").st_dev, os.geteuid()

    def remove(self, path: str) -> None:
        """Those at and below a path that lead out, or nowhere. Raises OSError."""
        if not os.path.lexists(path):
            return
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid == self._user and self._leads_out(path):
                os.unlink(path)
        elif stat.S_ISDIR(found.st_mode) and found.st_dev == self._device:
            self._remove_in(path, found)

    def _remove_in(self, folder: str, found: os.stat_result) -> None:
        own = found.st_uid == self._user
        if own and (folder.count("/") > _MAX_DEPTH or len(os.fsencode(folder)) > _MAX_PATH):
            _move_away(folder)
            return
        if own:
            os.chmod(folder, 0o700)
        for name in os.listdir(folder):
            self.remove(os.path.join(folder, name))
        if own:
            os.chmod(folder, stat.S_IMODE(found.st_mode))

    def _leads_out(self, path: str) -> bool:
        """Follows a link as the kernel does, and looks at each place on the way."""
        at, names, n_links = os.path.dirname(path), [os.path.basename(path)], 0
        while names:
            self._left -= 1
            if (name := names.pop()) in ("", "."):
                continue
            at = os.path.dirname(at) if name == ".." else os.path.join(at, name)
            if at in self._out or self._left < 0:
                return True
            try:
                text = os.readlink(at)
            except OSError as error:
                if error.errno != errno.EINVAL:  # nothing is there
                    return True
                continue
            n_links += 1
            if n_links > _MAX_LINKS:
                return True
            at = "/" if text.startswith("/") else os.path.dirname(at)
            names += reversed(text.split("/"))
        return at == "/" or not self._stays(at)

    def _stays(self, path: str) -> bool:
        """Whether what lies there was left, or is the machine's, which nobody here can write."""
        around = {path, *_above(path)}
        if around.intersection(self._kept) - {"/"}:
            return True
        if around.intersection(_TEMPORARY):
            return False
        return _CONFIGURATION in around or "/" in self._kept or os.lstat(path).st_dev != self._device


METHODS = {"renew": renew}
