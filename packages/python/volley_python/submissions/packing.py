"""Bytes of an environment that a configuration or a request names by a file, a folder or an import path.

No code of it is run or imported.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from shared.run.sources import FoundSource
from volley_python.submissions.imports import files_with_imports, metadata_of, text_of, tree_of

MAX_BYTES, MAX_FILES = 4 * 2**20, 1000
"""Limits of a package, the same as the environment service's limits of an archive."""
_SINCE = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT = ("__pycache__", ".git", ".venv")
TASK_PARTS = ("environment", "tests", "solution", "steps")
"""Folders of a Harbor task, whose files are all its own."""
TASK_FILE = "task.toml"
_TASKS_HINT = "make several environments of the tasks, and put large files into images (environment.docker_image)"


def source_identity(found: FoundSource, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the environment's name without version, and the SHA-256 of its bytes. Raises ConfigError."""
    content, _ = content_of(found)
    return _name_of(found, content, settings), hashlib.sha256(content).hexdigest()


def content_of(found: FoundSource) -> tuple[bytes, bool]:
    """Return the bytes to submit, and True if they are an archive. Raises ConfigError.

    They are the file, or a zip file of the folder, of the package and its declared dependencies, or of the file and the
    modules beside it that it imports.
    """
    try:
        if _is_imported(found):
            return _packed(found.path), True
        if found.path.is_dir():
            return packed_folder(found.path), True
        if (size := found.path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{found.path} has {size} bytes", f"at most {MAX_BYTES} bytes are accepted")
        if found.path.suffix != ".py":
            return found.path.read_bytes(), True
        packed = packed_file(found.path)
        return (found.path.read_bytes(), False) if packed is None else (packed, True)
    except OSError as error:
        raise ConfigError(f"{found.path}: {(error.strerror or str(error)).lower()}") from error


def _is_imported(found: FoundSource) -> bool:
    """True for the class of a package or module that was found by its import path."""
    top = re.split("[.:]", found.entry or "")[0]
    return ":" in (found.entry or "") and top == found.path.stem and found.path.suffix not in (".zip", ".whl")


def _name_of(found: FoundSource, content: bytes, settings: Mapping[str, Any]) -> str:
    """Return the environment's name without version, at most 64 characters."""
    identity = [hashlib.sha256(content).hexdigest(), found.entry, settings]
    digest = hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:8]
    plain = found.entry.rpartition(":")[2] if found.entry and ":" in found.entry else found.path.stem
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', plain).lstrip('_-')[:48] or 'environment'}-{digest}"


def _packed(path: Path) -> bytes:
    """Pack a package or module with its declared dependencies. Raises ConfigError, OSError."""
    files = {f"{path.name}/{name}": file for name, file in _files(path)} if path.is_dir() else {path.name: path}
    return _zipped(files, path, _declared(path))


def _zipped(
    files: Mapping[str, Path], path: Path, more: Iterable[tuple[str, bytes]] = (), *, modes: bool = False
) -> bytes:
    """Zip files reproducibly: equal files give equal bytes. Raises ConfigError, OSError.

    Args: modes: note which files are executable.
    """
    size = sum(file.stat().st_size for file in files.values())
    if len(files) > MAX_FILES or size > MAX_BYTES:
        raise ConfigError(
            f"{path} has {len(files)} files and {size / 2**20:.1f} MiB; at most {MAX_FILES} files and "
            f"{MAX_BYTES >> 20} MiB are packed",
            _TASKS_HINT
            if any(Path(name).name == TASK_FILE for name in files)
            else "move what the environment needs into a smaller package, or declare the large one as a dependency",
        )
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted([*((n, file.read_bytes()) for n, file in files.items()), *more]):
            info = zipfile.ZipInfo(name, _SINCE)
            if modes and files[name].stat().st_mode & 0o100:
                info.external_attr = 0o100755 << 16
            archive.writestr(info, content)
    return out.getvalue()


def packed_file(path: Path) -> bytes | None:
    """Zip a Python file with the modules of its folder that it imports.

    None if it imports none, or if it cannot be parsed: the sandbox names the line. Raises ConfigError, OSError.
    """
    try:
        tree_of(path)
    except ConfigError:
        return None
    module = re.sub(r"\W", "_", path.stem)
    if not module.isidentifier() or module in sys.stdlib_module_names:
        module = f"environment_{module}"
    files = files_with_imports(path, f"{module}.py")
    if len(files) == 1:
        return None
    blocks = [metadata_of(name, text_of(file)) for name, file in files.items()]
    needed = dict.fromkeys(one for block in blocks for one in block.get("dependencies", ()))
    project = (
        f'[project]\nname = "{module}"\nversion = "0"\ndependencies = {orjson.dumps([*needed]).decode()}\n'
        f"requires-python = {orjson.dumps(blocks[0].get('requires-python', '')).decode()}\n"
        f'[project.entry-points."volley.environments"]\nenvironment = "{module}"\n'
    )
    return _zipped(files, path, [("pyproject.toml", project.encode())])


def packed_folder(folder: Path) -> bytes:
    """Zip a folder: Harbor's task folders, a package, or a project with its modules at its top or in `src`.

    Raises ConfigError naming what is missing, OSError.
    """
    files = dict(_files(folder))
    if not any(_is_importable(name) or Path(name).name == TASK_FILE for name in files):
        raise ConfigError(
            f"{folder} holds no environment: no Python module or package at its top or in src/, and no task.toml",
            "name the folder of a project, of a package, or of Harbor tasks",
        )
    files |= _task_files(folder, [Path(name).parent for name in files if Path(name).name == TASK_FILE])
    is_nested = {"__init__.py", TASK_FILE} & files.keys()
    named = {f"{folder.name}/{name}" if is_nested else name: file for name, file in files.items()}
    return _zipped(named, folder, modes=True)


def _task_files(folder: Path, tasks: Sequence[Path]) -> Mapping[str, Path]:
    """Files of Harbor tasks that a package would leave out: repositories, and links to other files of the folder.

    Raises ConfigError for any other link that a task needs, or that leads to tasks.
    """
    found, every = dict[str, Path](), {*tasks}
    for file in folder.rglob("*") if tasks else ():
        name = file.relative_to(folder)
        is_part = any(above in every and name.relative_to(above).parts[0] in TASK_PARTS for above in name.parents)
        if not is_part and {*name.parts} & {*_LEFT_OUT}:
            continue
        if file.is_symlink() and not (file.is_file() and file.resolve().is_relative_to(folder)):
            if not is_part and name.name != "instruction.md" and not _holds_tasks(file):
                continue
            raise ConfigError(
                f"{file} is a link that leads out of {folder}, to a folder, or to nothing",
                "put a copy of what it leads to in its place, or let the Dockerfile make the link",
            )
        if file.is_file() and "__pycache__" not in name.parts:
            found[name.as_posix()] = file
    return found


def _holds_tasks(link: Path) -> bool:
    """True if a link leads to a task.toml, to a task, or to a folder of tasks."""
    return link.name == TASK_FILE or any(True for depth in ("", "*/") for _ in link.glob(depth + TASK_FILE))


def _is_importable(name: str) -> bool:
    """True if a file makes a module or package that can be imported from the folder or its `src`."""
    parts = name.removeprefix("src/").split("/")
    return name.endswith(".py") if len(parts) == 1 else parts[1:] == ["__init__.py"]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if file.is_file() and not file.is_symlink() and not {*name.parts} & {*_LEFT_OUT} and file.suffix != ".pyc":
            yield name.as_posix(), file


def _declared(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files that declare a package's dependencies: pyproject.toml beside it, else its installed metadata."""
    from importlib.metadata import Distribution  # its finders remember a folder that could not be listed as empty

    if (project := path.parent / "pyproject.toml").is_file():
        yield project.name, project.read_bytes()
        return
    beside = map(Distribution.at, sorted(path.parent.glob("*.dist-info")))
    for found in islice((one for one in beside if any(file.parts[0] == path.name for file in one.files or ())), 1):
        if (metadata := found.read_text("METADATA")) is not None:
            yield f"{path.stem}-0.dist-info/METADATA", metadata.encode()
            yield f"{path.stem}-0.dist-info/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
