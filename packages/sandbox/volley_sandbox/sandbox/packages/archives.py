"""Submitted zip files and wheels, unpacked into a folder that sandboxes may read.

The bytes are untrusted, and so is everything that the archive states about itself: sizes are counted during extraction,
names are validated part by part, and only files and folders are made. An archive is unpacked completely or not at all,
into a folder named by its digest.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import unicodedata
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from shared.errors import DecodeError, InputError, TooLarge
from volley_sandbox.sandbox.packages.dependencies import read_metadata
from volley_sandbox.sandbox.packages.toml import read_toml
from volley_sandbox.sandbox.process import workspace

ENTRY_GROUP = "volley.environments"
"""Group of entry points in which a wheel declares its environments: NAME = package.module:Class."""
MAX_PART = 100
MAX_DEPTH = 12
_BLOCK = 2**16
_ENTRY_MARK = b"PK\x01\x02"
_FORBIDDEN = frozenset('<>:"|?*\\')
_MAX_READ = 2**20
_CLASS = re.compile(r"^class[ \t]+(\w+)(.*)((?:\n(?:[ \t)#].*)?)*)", re.MULTILINE)
_NAME = re.compile(r"\w+")
_METHOD = re.compile(r"^[ \t]+(?:async[ \t]+)?def[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits of one archive: entries, MiB of one file and of all files when unpacked."""

    entries: int = 2000
    file_mb: int = 16
    total_mb: int = 64


@dataclass(frozen=True, slots=True)
class UnpackedArchive:
    """An archive on disk.

    Args:
        top: folder with the unpacked content.
        folder: folder from which its modules are imported.
        modules: names of the top-level modules and packages, in order.
        requirements: declared dependencies: a wheel's Requires-Dist, else those in pyproject.toml, else those in the
        PEP 723 block of its only file, or of the only one with an environment.
        requires_python: declared Python versions; empty for any.
        entries: environments as package.module:Class, or a module: those that it declares; else, of several modules,
        all classes with the methods reset and step, or reset and judge.
    """

    top: Path
    folder: Path
    modules: tuple[str, ...]
    requirements: tuple[str, ...]
    requires_python: str
    entries: tuple[str, ...]

    def locate(self, entry: str | None) -> tuple[str, str | None]:
        """Resolve `entry` to (module, class or None).

        `entry` is package.module:Class, or a class of the only module or of one of `entries`, or None for the only
        one. Raises
        InputError.
        """
        if entry is not None and ":" in entry:
            module, _, name = entry.partition(":")
            return _checked_module(module), name or None
        chosen = [one for one in self.entries if entry is None or one.partition(":")[2] in ("", entry)]
        if len(chosen) == 1:
            module, _, name = chosen[0].partition(":")
            return _checked_module(module), name or entry
        if len(self.modules) == 1 and len(self.entries) <= 1:
            return self.modules[0], entry
        choice = ", ".join(self.entries or self.modules)[:500] or "no module at all"
        name = (chosen or self.entries or [f"{next(iter(self.modules), 'module')}:{entry or 'Class'}"])[0]
        raise InputError(
            f"the archive holds {choice}; which class is the environment?",
            f"name it: --entry {name} of `volley env`, data.env=FOLDER:{name} of a run, ?entry={name} of a request",
        )


def unpack(data: bytes, folder: Path, limits: ArchiveLimits | None = None) -> UnpackedArchive:
    """Unpack a zip file or a wheel below `folder`. Idempotent for equal bytes.

    Blocks while writing. Raises DecodeError (no zip file), InputError (forbidden content), TooLarge.
    """
    limits = limits or ArchiveLimits()
    if data.count(_ENTRY_MARK) > limits.entries:
        raise TooLarge(f"the archive has more than {limits.entries} entries", "remove files that are not needed")
    place = folder / hashlib.sha256(data).hexdigest()[:32]
    if not place.is_dir():
        work = folder / f".new-{uuid.uuid4().hex}"
        work.mkdir(parents=True)
        try:
            _extract(data, work, limits)
            _described(work)
            work.rename(place)
        finally:
            workspace.remove(work)
    return _described(place)


def _extract(data: bytes, folder: Path, limits: ArchiveLimits) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            plan = _planned(archive.infolist(), limits)
            left = limits.total_mb * 2**20
            for path, info in plan.items():
                target = folder / path
                if info.is_dir():
                    _make_folder(target, folder)
                    continue
                _make_folder(target.parent, folder)
                left -= _write(archive, info, target, min(left, limits.file_mb * 2**20))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DecodeError(f"the archive cannot be unpacked: {str(error)[:200]}", "send a zip file or a wheel") from None
    except (RuntimeError, ValueError, UnicodeError, OverflowError, IndexError) as error:
        raise DecodeError(f"the archive is malformed: {str(error)[:200]}", "send a zip file or a wheel") from None


def _planned(entries: list[zipfile.ZipInfo], limits: ArchiveLimits) -> dict[PurePosixPath, zipfile.ZipInfo]:
    """Map target paths to entries. Raises InputError for a forbidden path, or for two entries with one path."""
    if len(entries) > limits.entries:
        raise TooLarge(f"the archive has {len(entries)} entries; the limit is {limits.entries}")
    plan: dict[PurePosixPath, zipfile.ZipInfo] = {}
    taken: dict[str, bool] = {}
    for info in entries:
        path = _safe_path(info)
        key = _folded(path)
        if key in taken and not (taken[key] and info.is_dir()):
            raise InputError(
                f"the archive has {info.filename[:MAX_PART]!r} twice, or two names that some systems confuse"
            )
        for parent in path.parents[:-1]:
            if taken.setdefault(_folded(parent), True) is False:
                raise InputError(f"in the archive {str(parent)[:MAX_PART]!r} is a file and a folder")
        taken[key] = info.is_dir()
        plan[path] = info
    return plan


def _safe_path(info: zipfile.ZipInfo) -> PurePosixPath:
    """Target path of an entry.

    Raises InputError unless it is a plain file or folder with a plain name below the top.
    """
    name, mode = info.orig_filename, info.external_attr >> 16
    shown = repr(name[:MAX_PART])
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise InputError(f"{shown} is a link or a device", "archives may hold files and folders only")
    if info.flag_bits & 0x1:
        raise InputError(f"{shown} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{shown} is compressed with an unsupported method", "use deflate, as zip does by default")
    if name.startswith("/") or not name.isprintable() or _FORBIDDEN & set(name):
        raise InputError(f"{shown} is not a name for a file in an archive", "use relative names with / between folders")
    parts = name.rstrip("/").split("/")
    if len(parts) > MAX_DEPTH or any(len(part.encode()) > MAX_PART for part in parts):
        raise InputError(f"{shown} is too long or too deep", f"at most {MAX_DEPTH} parts of {MAX_PART} bytes")
    if any(part in ("", ".", "..") or part != part.rstrip(". ") for part in parts):
        raise InputError(f"{shown} points outside the archive, or is not a plain name")
    return PurePosixPath(*parts)


def _folded(path: PurePosixPath) -> str:
    """Key that is equal for names which some file system treats as the same."""
    return unicodedata.normalize("NFKC", str(path)).casefold()


def _make_folder(path: Path, top: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    while path != top.parent:
        path.chmod(0o755)
        path = path.parent


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, most: int) -> int:
    """Write one entry and return its number of bytes, whatever size it declares. Raises TooLarge."""
    n = 0
    with archive.open(info) as source, target.open("xb") as file:
        while block := source.read(_BLOCK):
            n += len(block)
            if n > most:
                raise TooLarge("the archive is too large when it is unpacked", "remove files that are not needed")
            file.write(block)
    target.chmod(0o755 if info.external_attr >> 16 & 0o100 else 0o644)
    return n


def _described(top: Path) -> UnpackedArchive:
    top = _without_folder(top)
    infos = sorted(top.glob("*.dist-info"))
    folder = top / "src" if not infos and (top / "src").is_dir() else top
    modules = tuple(sorted(_modules(folder)))
    is_project = (top / "pyproject.toml").is_file()
    requirements, python, entries = tuple[str, ...](), "", tuple[str, ...]()
    if infos:
        requirements, python = _of_wheel(infos[0])
        entries = _entry_points(infos[0])
    elif is_project:
        requirements, python, entries = _of_project(top / "pyproject.toml")
    if not entries and len(modules) > 1:
        entries = tuple(_environments(folder, modules))
    with_them = {one.partition(":")[0] for one in entries} or {*modules}
    if not infos and not is_project and len(with_them) == 1:
        block = read_metadata(_text(folder / f"{with_them.pop()}.py"))
        requirements, python = block.dependencies, block.requires_python
    return UnpackedArchive(top, folder, modules, requirements, python, entries)


def _without_folder(top: Path) -> Path:
    """Return the only folder of an archive that holds nothing else, unless it is a package or a task."""
    inside = list(top.iterdir())
    if len(inside) != 1 or not inside[0].is_dir():
        return top
    is_named = any((inside[0] / name).is_file() for name in ("__init__.py", "task.toml"))
    return inside[0] if not is_named and (_modules(inside[0]) or (inside[0] / "pyproject.toml").is_file()) else top


def _modules(folder: Path) -> set[str]:
    files = {path.stem for path in folder.glob("*.py") if path.stem.isidentifier() and path.stem != "setup"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py") if path.parent.name.isidentifier()}


def _environments(folder: Path, modules: Sequence[str]) -> Iterator[str]:
    """Classes of modules that look like environments, and those that inherit from them, as module:Class, by text."""
    plain: set[str] = set()
    texts = {one: _text(folder / f"{one}.py") or _text(folder / one / "__init__.py") for one in modules}
    classes = [(module, *found) for module, text in texts.items() for found in _CLASS.findall(text)]
    for _, name, _, body in classes:
        methods = set(_METHOD.findall(body))
        plain |= {name} if "reset" in methods and methods & {"step", "judge"} else set()
    return (f"{module}:{name}" for module, name, bases, _ in classes if plain & {name, *_NAME.findall(bases)})


def _of_wheel(info: Path) -> tuple[tuple[str, ...], str]:
    """Requirements of a wheel without its extras, and its Python versions."""
    if "Root-Is-Purelib: true" not in _text(info / "WHEEL"):
        raise InputError("the wheel does not declare that it is pure Python", "send a wheel with Root-Is-Purelib: true")
    metadata = HeaderParser().parsestr(_text(info / "METADATA"))
    requirements = tuple(str(one) for one in metadata.get_all("Requires-Dist", []))
    return tuple(one for one in requirements if "extra" not in one.partition(";")[2]), metadata.get(
        "Requires-Python", ""
    )


def _of_project(path: Path) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    project: Any = read_toml(_text(path), "pyproject.toml of the archive cannot be read").get("project", {})
    try:
        dependencies, python = project.get("dependencies", []), project.get("requires-python", "")
        entries = tuple(project.get("entry-points", {}).get(ENTRY_GROUP, {}).values())
    except AttributeError:
        raise InputError("pyproject.toml: project and its entry-points must be tables") from None
    if not isinstance(python, str) or not isinstance(dependencies, list):
        raise InputError("pyproject.toml: dependencies must be a list of texts, requires-python a text")
    if not all(isinstance(one, str) for one in [*dependencies, *entries]):
        raise InputError("pyproject.toml: dependencies and entry points must be texts")
    return tuple(dependencies), python, entries


def _entry_points(info: Path) -> tuple[str, ...]:
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    try:
        parser.read_string(_text(info / "entry_points.txt"))
    except ConfigParserError as error:
        raise InputError(f"entry_points.txt of the wheel cannot be read: {str(error)[:200]}") from None
    return tuple(parser[ENTRY_GROUP].values()) if parser.has_section(ENTRY_GROUP) else ()


def _text(path: Path) -> str:
    """Text of a file, at most 1 MiB; empty if the file is missing."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_READ).decode("utf-8-sig", "replace")
    except FileNotFoundError:
        return ""


def _checked_module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{name[:MAX_PART]!r} is not the name of a module", "write package.module:Class")
    return name
