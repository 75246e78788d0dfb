"""Turn an environment of a user into a request to the service.

A file or folder becomes the text of a Python file or the bytes of a zip file. None of it is imported or run.
"""

from __future__ import annotations

import codecs
import io
import sys
import tokenize
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from volley_python.submissions.packing import MAX_BYTES, packed_file, packed_folder

STDIN = Path("-")
_ZIP_MARKS = (b"PK\x03\x04", b"PK\x05\x06")
_ARCHIVES = (".zip", ".whl")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a file or folder.

    `name`: its stem, empty for standard input. `data`: the zip file's bytes, or Python text in UTF-8.
    """

    name: str
    data: bytes
    archive: bool


@dataclass(frozen=True, slots=True)
class EnvSource:
    """The environment to submit.

    A file or folder, the text `code` of a Python file, the import path of a package that the service has installed, or
    the address of a remote environment with its task files by split. `config` is a file with its settings.
    """

    file: Path | None = None
    import_path: str | None = None
    remote: str | None = None
    protocol: str | None = None
    tasks: Mapping[str, Path] = field(default_factory=dict[str, Path])
    config: Path | None = None
    entry: str | None = None
    code: str | None = None

    def body(self, name: str | None, weight: float) -> dict[str, Any]:
        """Body of POST /environments, where `archive` holds a zip file's bytes. Raises ConfigError."""
        content = self._content()
        whole: dict[str, Any] = {"config": settings_of(self.config), "weight": weight}
        whole["name"] = name or self._plain_name(content)
        if content is not None:
            form = {"archive": content.data} if content.archive else {"source": content.data.decode()}
            return {**whole, **form, "entry": self.entry}
        if self.import_path is not None:
            return {**whole, "import_path": self.import_path}
        tasks = {split: _text(path) for split, path in self.tasks.items()}
        return {**whole, "url": self.remote, "protocol": self.protocol, **({"tasks": tasks} if tasks else {})}

    def _content(self) -> Content | None:
        """Raises ConfigError."""
        if self.file is not None and self.code is not None:
            raise ConfigError(f"both {self.file} and the code of an environment are given", "give one of them")
        if self.code is not None:
            return _recognised("the code of the environment", "", self.code.encode())
        return read_content(self.file) if self.file is not None else None

    def _plain_name(self, content: Content | None) -> str:
        """Raises ConfigError."""
        if content is not None and content.name:
            return content.name
        if self.import_path is not None:
            return self.import_path.rpartition(":")[2]
        if content is None and self.remote is None:
            raise ConfigError("no environment is given", "name a file, or give the code of one")
        origin = "without a file" if self.code is not None else "from standard input"
        what = f"an environment {origin}" if content is not None else "a remote environment"
        raise ConfigError(f"{what} needs a name", "add --name NAME, or name=… in Python")


def read_content(path: Path) -> Content:
    """Read a Python file and its imports, a zip file, a wheel or a folder; `-` is stdin. Raises ConfigError."""
    if path == STDIN:
        return _recognised("standard input", "", sys.stdin.buffer.read(MAX_BYTES + 1))
    try:
        if path.is_dir():
            return Content(path.resolve().name, packed_folder(path.resolve()), True)
        if not path.is_file():
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {problem}", "name a Python file, a .zip, a .whl or a folder")
        if path.suffix not in ("", ".py", *_ARCHIVES):
            raise ConfigError(f"{path} is no environment", "name a Python file, a .zip, a .whl or a folder")
        with path.open("rb") as file:
            content = _recognised(str(path), path.stem, file.read(MAX_BYTES + 1), is_archive=path.suffix in _ARCHIVES)
        packed = packed_file(path) if path.suffix == ".py" and not content.archive else None
        return content if packed is None else Content(content.name, packed, True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def settings_of(file: Path | None) -> Mapping[str, Any]:
    """Settings of a YAML file; none if `file` is None. Raises ConfigError."""
    if file is None:
        return {}
    from shared.config_files import read_tree

    settings = read_tree(file)
    try:
        orjson.dumps(settings)
    except TypeError as error:
        raise ConfigError(f"{file}: {error}", "settings must be JSON values; put quotes around a date") from error
    return settings


def _recognised(what: str, name: str, data: bytes, *, is_archive: bool = False) -> Content:
    """Tell zip files from Python files by content. Raises ConfigError.

    Args:
        is_archive: the file's name ends in .zip or .whl.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} has more than {MAX_BYTES} bytes", "declare large packages as dependencies")
    if not data.strip():
        raise ConfigError(f"{what} is empty", "an environment is a Python file, a .zip, a .whl or a folder")
    if data.startswith(_ZIP_MARKS):
        _check_zip(what, data)
        return Content(name, data, True)
    if is_archive:
        raise ConfigError(f"{what} is not a zip file", "make one with `python -m zipfile -c NAME.zip FOLDER`")
    return Content(name, _python_text(what, data).encode(), False)


def _check_zip(what: str, data: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            n = len(archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, IndexError) as error:
        raise ConfigError(f"{what} is a damaged zip file: {error}", "make it again") from None
    if not n:
        raise ConfigError(f"{what} is a zip file without files", "put the environment into it")


def _python_text(what: str, data: bytes) -> str:
    """Decode a Python file: UTF-16 by its byte-order mark, else its declared encoding (PEP 263). Raises ConfigError."""
    try:
        encoding = "utf-16" if data.startswith(_UTF_16) else tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding).removeprefix("\ufeff")
    except (SyntaxError, UnicodeError, LookupError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(
            f"{what} is not a readable Python file: {reason}",
            "save it as UTF-8, or declare its encoding in its first line: # -*- coding: latin-1 -*-",
        ) from None
    if "\0" in text:
        raise ConfigError(f"{what} is not a Python file: it holds null bytes", "name a .py, .zip or .whl file")
    return text


def _text(file: Path) -> str:
    """Raises ConfigError."""
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
