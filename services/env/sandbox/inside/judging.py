"""Reset of a sandbox before a task is graded: only the folders to be graded are kept.

Nothing else may run meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from values import Refused

_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - in a private root
_NOT_THE_TASKS = ("/proc", "/dev")
_CONFIGURATION = "/etc"  # in the sandbox's root and not writable for its users
_MAX_DEPTH, _MAX_PATH = 200, 3800
"""Limits of nesting, in folders and in bytes of the path; deeper folders are moved away."""
_MAX_LINKS, _MAX_STEPS = 40, 50_000
"""Links that one link may pass through, as in the kernel; path components examined for all links together."""


def renew(paths: list[str], kept: list[str], workdir: str) -> None:
    """Remove everything made here except `kept`, and make `paths` new empty folders.

    Args:
            kept: absolute paths, kept with everything below them; "/" keeps all but temporary files.
        workdir: becomes a folder if it is none.

    Links in `kept` are removed if they are broken, lead through `paths`, /proc or /dev, or end neither below `kept` nor
    in the machine's own files, because they would show the tests' files. After a bounded number of steps, the remaining
    links are removed unexamined.

    Invariant: on return, no component of `paths` or `workdir` is a link, and mkdir made the last component of each of
    `paths` here. Moved entries get an unpredictable name (rename has no effect if both names are links to one file).
    Raises Refused.
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
        raise Refused(f"{error.filename or 'a folder'} cannot be reset: {error.strerror}") from None


def _above(path: str) -> list[str]:
    """Parent folders of a path, ending with "/"."""
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


def _clear(folder: str, kept: set[str], above: set[str]) -> None:
    """Move away this user's entries in a folder and its system subfolders. Raises OSError."""
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
    """Make a path of folders of this user, keeping those that exist. Raises OSError."""
    if path == "/":  # root's and sticky
        return
    _open_folder(os.path.dirname(path))
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            os.chmod(path, 0o755)  # noqa: S103 - the mode that mkdir gives it
            return
        if stat.S_ISDIR(found.st_mode) and found.st_uid == 0:  # the system's, such as /root
            return
    _move_away(path)
    os.mkdir(path, 0o755)


def _move_away(path: str) -> None:
    """Move an entry to a name that no program looks up. Raises OSError, also if the path still exists afterwards."""
    with contextlib.suppress(FileNotFoundError):
        mode, away = os.lstat(path).st_mode, f"/.removed-{os.urandom(16).hex()}"
        if stat.S_ISDIR(mode):
            os.chmod(path, 0o700)  # a folder without write permission cannot be moved
            os.rename(path, away)
            os.chmod(away, 0)
        else:  # a file that may have another hard link, which would share a changed mode
            os.unlink(path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "it cannot be moved away", path)


class _Links:
    """Checker of symbolic links.

    Args:
        out: paths through which no link may lead.
        kept: paths where a link may end, in addition to the machine's own files.
    """

    def __init__(self, out: set[str], kept: list[str]) -> None:
        self._out, self._kept, self._left = out, kept, _MAX_STEPS
        self._device, self._user = os.lstat("/").st_dev, os.geteuid()

    def remove(self, path: str) -> None:
        """Remove links at and below a path that lead out, or are broken. Raises OSError."""
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
        """Follow a link as the kernel does, checking each place on the way."""
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
                if error.errno != errno.EINVAL:  # nothing exists there
                    return True
                continue
            n_links += 1
            if n_links > _MAX_LINKS:
                return True
            at = "/" if text.startswith("/") else os.path.dirname(at)
            names += reversed(text.split("/"))
        return at == "/" or not self._stays(at)

    def _stays(self, path: str) -> bool:
        """True if the path was kept, or is the machine's, which is not writable here."""
        around = {path, *_above(path)}
        if around.intersection(self._kept) - {"/"}:
            return True
        if around.intersection(_TEMPORARY):
            return False
        return _CONFIGURATION in around or "/" in self._kept or os.lstat(path).st_dev != self._device


METHODS = {"renew": renew}
