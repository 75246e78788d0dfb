"""Supported part of a task's Dockerfile in a sandbox without images: WORKDIR, ENV, and COPY from its own folder.

Any other instruction is rejected by name, because a task in an incomplete environment teaches something else. An image
is known only by its name. Plain system and Python images hold nothing that the machine lacks, except perhaps other
versions; running the task's solution shows whether they suffice.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import orjson

from shared.errors import InputError

MAX_BYTES = 2**16
"""Bytes of a Dockerfile."""
MAX_SOURCES, MAX_COPIES = 200, 4000
"""Limits over all COPY instructions: sources, and files and folders made by COPY and WORKDIR."""
MAX_PLACE = 1024
"""Characters of a path in the sandbox."""
READ_ONLY = ("/bin", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/usr")
"""Read-only folders of the sandbox."""
_PLAIN_IMAGE = re.compile(r"(?:[^/\s]+/)*(?:bash|debian|ubuntu|python)(?:-\d+)*(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")
_WITHOUT_EFFECT = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
"""Instructions without effect: Harbor gives the container its own command and publishes nothing."""
_WHY: Mapping[str, str] = {
    "ADD": "it fetches and unpacks; use COPY for files",
    "ARG": "it never gets a value",
    "ENTRYPOINT": "nothing is started before the first command",
    "HEALTHCHECK": "nothing is started before the first command",
    "RUN": "a sandbox has no image to change, and no network",
    "SHELL": "commands run in bash",
    "USER": "a sandbox has one user",
    "VOLUME": "there is nothing to mount",
}


@dataclass(frozen=True, slots=True)
class Image:
    """Initial content of a sandbox: working folder, variables, folders, and files by absolute path."""

    workdir: str = "/"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    folders: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])


def check_image(name: str) -> None:
    """Raises InputError for an image that holds more than a plain system."""
    if name != "scratch" and not _PLAIN_IMAGE.fullmatch(name):
        raise InputError(
            f"the image {name[:200]!r} holds programs or files that a sandbox does not have",
            "use a plain image of ubuntu, debian, bash or python; a sandbox replaces only these",
        )


def read(context: Path) -> Image:
    """Read `context`/Dockerfile. Raises InputError naming the first unsupported line."""
    if (context / ".dockerignore").exists():
        raise InputError("environment/.dockerignore is not supported", "remove the files that must not be copied")
    made = _Build(context)
    file = context / "Dockerfile"
    if (size := file.stat().st_size) > MAX_BYTES:
        raise InputError(f"environment/Dockerfile has {size} bytes", f"the limit is {MAX_BYTES}")
    for number, line in _instructions(file.read_text("utf-8", "replace")):
        try:
            made.do(line)
        except InputError as error:
            raise InputError(f"environment/Dockerfile, line {number}: {error.detail}", error.hint) from None
    if not made.begun:
        raise InputError("environment/Dockerfile has no FROM")
    return Image(made.workdir, made.env, tuple(made.folders), made.files)


def _instructions(text: str) -> Sequence[tuple[int, str]]:
    """List (first line number, instruction with its continuation lines), without comments."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    begun = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            found.append((begun, " ".join(parts).strip()))
            parts = []
    return [*found, *([(begun, " ".join(parts).strip())] if parts else [])]


class _Build:
    """State after the instructions so far."""

    def __init__(self, context: Path) -> None:
        self.begun, self.workdir = False, "/"
        self.env: dict[str, str] = {}
        self.folders: list[str] = []
        self.files: dict[str, Path] = {}
        self._context = context.resolve()
        self._n_sources = self._n_copies = 0

    def do(self, line: str) -> None:
        """Apply one instruction. Raises InputError."""
        word, *others = line.split(maxsplit=1)
        name, rest = word.upper(), "".join(others)
        if name == "FROM":
            self._from(rest.split())
        elif name == "WORKDIR":
            self.workdir = self._absolute(_literal(rest))
            self._put(self.workdir, None)
        elif name == "ENV":
            self._set(rest)
        elif name == "COPY":
            self._copy(rest)
        elif name not in _WITHOUT_EFFECT:
            raise InputError(f"{name[:20]} is not supported: {_WHY.get(name, 'it is unknown')}", _HINT)

    def _from(self, words: Sequence[str]) -> None:
        if self.begun:
            raise InputError("a second FROM: there is no image to copy from", _HINT)
        if not words or words[0].startswith("--"):
            raise InputError("FROM without the name of an image", _HINT)
        check_image(words[0])
        self.begun = True

    def _set(self, rest: str) -> None:
        """Apply ENV: NAME=VALUE …, or NAME VALUE."""
        first, _, value = rest.partition(" ")
        pairs = _words(rest) if "=" in first else [f"{first}={value.strip()}"]
        for pair in pairs:
            key, _, value = pair.partition("=")
            self.env[check_variable(key)] = _literal(value)

    def _copy(self, rest: str) -> None:
        words = _listed(rest) if re.match(r'\[\s*["\]]', rest) else _words(rest)
        if flags := [word for word in words if word.startswith("--")]:
            raise InputError(f"COPY {flags[0][:80]} is not supported: files belong to the sandbox's user", _HINT)
        if len(words) < 2:
            raise InputError("COPY needs a source and a target", _HINT)
        *sources, place = (_literal(word) for word in words)
        self._n_sources += len(words) - 1
        if self._n_sources > MAX_SOURCES:
            raise InputError(f"COPY: more than {MAX_SOURCES} sources", _HINT)
        found = [path for source in sources for path in self._found(source)]
        target = self._absolute(place)
        into = place.endswith(("/", "/.")) or place == "." or len(found) > 1 or self._is_folder(target)
        for path in found:
            if path.is_dir():
                self.folders.append(target)
                for one in path.rglob("*"):
                    self._put(f"{target}/{one.relative_to(path)}", one)
            else:
                self._put(f"{target}/{path.name}" if into else target, path)

    def _is_folder(self, target: str) -> bool:
        """True if the target is a folder by now, perhaps a file's parent."""
        below = target.rstrip("/") + "/"
        return target in self.folders or any(path.startswith(below) for path in (*self.folders, *self.files))

    def _put(self, target: str, source: Path | None) -> None:
        """Add a file, or a folder if there is no source."""
        self._n_copies += 1
        if self._n_copies > MAX_COPIES:
            raise InputError(f"more than {MAX_COPIES} files and folders", _HINT)
        if source is None or source.is_dir():
            self.folders.append(target)
        else:
            self.files[target] = source

    def _found(self, source: str) -> Sequence[Path]:
        """Files and folders of the context that match a source. Raises InputError."""
        plain = PurePosixPath(source.lstrip("/"))
        if ".." in plain.parts:
            raise InputError(f"COPY {source[:80]} points outside environment/", _HINT)
        try:
            deep = any("**" in part for part in plain.parts)  # not a pattern of Docker's
            found = [] if deep else sorted(self._context.glob(str(plain))) if plain.parts else [self._context]
        except (ValueError, OSError):  # an invalid pattern, or a name that is too long
            found = []
        if not found:
            raise InputError(f"COPY {source[:80]}: there is no such file in environment/", _HINT)
        return found

    def _absolute(self, path: str) -> str:
        """Absolute path of a target. Raises InputError if it is in a read-only folder."""
        return check_place(str(PurePosixPath(self.workdir, path)))


_HINT = "docs/other-environments.md lists the supported parts of a task folder"


def check_place(path: str) -> str:
    """Normalize an absolute path. Raises InputError if nothing can be written there."""
    parts = PurePosixPath(path).parts
    if parts[:1] != ("/",) or ".." in parts or not path.isprintable():
        raise InputError(f"{path[:200]!r} is not a plain absolute path", _HINT)
    if len(path) > MAX_PLACE:
        raise InputError(f"{path[:80]!r}… has {len(path)} characters", f"the limit is {MAX_PLACE}")
    if len(parts) > 1 and f"/{parts[1]}" in READ_ONLY:
        raise InputError(f"{path[:200]} is not writable: /{parts[1]} belongs to the system", _HINT)
    return str(PurePosixPath(path))


def check_variable(name: str) -> str:
    """Return the name of a variable if it is valid. Raises InputError."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
        raise InputError(f"{name[:100]!r} is not the name of a variable", _HINT)
    return name


def _listed(text: str) -> list[str]:
    try:
        words = orjson.loads(text)
    except orjson.JSONDecodeError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{text[:80]!r} is not a list of texts", _HINT)
    return words


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{text[:80]!r} cannot be read: {error}", _HINT) from None


def _literal(text: str) -> str:
    """A value without variables. Raises InputError if it refers to one."""
    if "$" in text or "\0" in text:
        raise InputError(f"{text[:80]!r}: variables are not expanded", "write the value itself")
    return text.strip().strip('"')
