"""Files of one episode, in memory, without links or access to other paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from volley_sandbox.tools.base import Arguments, ToolDescription, ToolFault, describe, read_arguments

MAX_PATH, MAX_DEPTH = 200, 16


@dataclass(slots=True)
class Workspace:
    """Files by relative path with slashes. `changed` holds the paths written or removed since the last transfer."""

    max_files: int
    max_bytes: int
    content: dict[str, bytes] = field(default_factory=dict[str, bytes])
    changed: set[str] = field(default_factory=set[str])

    def write(self, path: str, data: bytes) -> str:
        """Write a file and return its normalized path. Raises ToolFault (path, limits)."""
        path = checked_path(path)
        used = sum(map(len, self.content.values())) - len(self.content.get(path, b""))
        if used + len(data) > self.max_bytes:
            raise ToolFault(f"the files would have {used + len(data)} bytes; there is room for {self.max_bytes}")
        if path not in self.content and len(self.content) >= self.max_files:
            raise ToolFault(f"there are {self.max_files} files already; no more are taken")
        folders = path.split("/")[:-1]
        if any("/".join(folders[: n + 1]) in self.content for n in range(len(folders))):
            raise ToolFault(f"a part of the path {path} is a file")
        if any(known.startswith(f"{path}/") for known in self.content):
            raise ToolFault(f"{path} is a folder")
        self.content[path] = data
        self.changed.add(path)
        return path

    def read(self, path: str) -> bytes:
        """Read a file. Raises ToolFault."""
        path = checked_path(path)
        if path not in self.content:
            known = ", ".join(sorted(self.content)[:20]) or "none"
            raise ToolFault(f"there is no file {path} (there are: {known})")
        return self.content[path]

    def remove(self, path: str) -> str:
        """Remove a file and return its normalized path. Raises ToolFault."""
        self.read(path)
        path = checked_path(path)
        del self.content[path]
        self.changed.add(path)
        return path


def checked_path(path: str) -> str:
    """Normalize a path. Raises ToolFault."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\\" in path or not parts:
        raise ToolFault(f"{path[:80]!r} is not a path inside the workspace; name files like notes/today.txt")
    if len(path) > MAX_PATH or len(parts) > MAX_DEPTH or not path.isprintable():
        raise ToolFault(f"a path has at most {MAX_PATH} printable characters and {MAX_DEPTH} parts")
    return "/".join(parts)


class ListFiles(Arguments):
    """No arguments."""


class ReadFile(Arguments):
    path: str
    first_line: int = Field(default=1, ge=1, description="where to begin")
    n_lines: int | None = Field(default=None, ge=1, description="how many; all if left out")


class WriteFile(Arguments):
    path: str
    content: str


class EditFile(Arguments):
    path: str
    old: str = Field(min_length=1, description="text that occurs once in the file")
    new: str


class DeleteFile(Arguments):
    path: str


WORKSPACE_TOOLS: tuple[ToolDescription, ...] = (
    describe("list_files", "Lists the files of the workspace with their sizes.", ListFiles),
    describe("read_file", "Reads a text file of the workspace.", ReadFile),
    describe("write_file", "Writes a text file of the workspace, in place of what it held.", WriteFile),
    describe("edit_file", "Replaces a piece of text in a file of the workspace.", EditFile),
    describe("delete_file", "Deletes a file of the workspace.", DeleteFile),
)


@dataclass(frozen=True, slots=True)
class WorkspaceSession:
    """The workspace tools. They share a lane with Python, which changes the same files."""

    workspace: Workspace
    tools = WORKSPACE_TOOLS
    lane = "files"

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        files = self.workspace
        match name:
            case "list_files":
                read_arguments(ListFiles, arguments)
                rows = [f"{path} ({len(data)} bytes)" for path, data in sorted(files.content.items())]
                return "\n".join(rows) or "there are no files"
            case "read_file":
                return self._read(read_arguments(ReadFile, arguments))
            case "write_file":
                written = read_arguments(WriteFile, arguments)
                data = encoded(written.content)
                return f"wrote {len(data)} bytes to {files.write(written.path, data)}"
            case "edit_file":
                return self._edit(read_arguments(EditFile, arguments))
            case _:
                return f"deleted {files.remove(read_arguments(DeleteFile, arguments).path)}"

    def _read(self, wanted: ReadFile) -> str:
        lines = self._text(wanted.path).splitlines(keepends=True)
        first = wanted.first_line - 1
        if first and first >= len(lines):
            raise ToolFault(f"the file has {len(lines)} lines")
        return "".join(lines[first : None if wanted.n_lines is None else first + wanted.n_lines]) or "the file is empty"

    def _edit(self, wanted: EditFile) -> str:
        text = self._text(wanted.path)
        if (n := text.count(wanted.old)) != 1:
            raise ToolFault(f"the text occurs {n} times in {wanted.path}; it must occur once")
        data = encoded(text.replace(wanted.old, wanted.new))
        return f"wrote {len(data)} bytes to {self.workspace.write(wanted.path, data)}"

    def _text(self, path: str) -> str:
        data = self.workspace.read(path)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolFault(f"{path} is no text: it has {len(data)} bytes that are not UTF-8") from None

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""


def encoded(text: str) -> bytes:
    """Encode text. Raises ToolFault for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolFault("the text holds characters that are none") from None
