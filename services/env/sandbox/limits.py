"""What one sandbox may use, and the programs it can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_SOURCE = 2**20
"""Characters of one submitted file."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one sandbox, over its whole life.

    Args:
        cpu_s: seconds of CPU time.
        memory_mb: address space, in MiB; a small program takes some 60 of it.
        threads: how many at once, the first included.
        file_mb: the largest file it may write, in MiB.
        disk_mb: all files of its private folder together, in MiB.
        open_files: descriptors open at once.
        frame_bytes: the largest answer to one call.
        log_bytes: how much of the end of its output is kept. A sandbox that writes more than LOG_FACTOR times as much
            is ended.
    """

    cpu_s: int = 60
    memory_mb: int = 512
    threads: int = 32
    file_mb: int = 16
    disk_mb: int = 64
    open_files: int = 64
    frame_bytes: int = 2**20
    log_bytes: int = 2**16


LOG_FACTOR = 256


@dataclass(frozen=True, slots=True)
class EnvironmentProgram:
    """A submitted environment.

    Args:
        source: the text of a Python file; None to import `module` from one of `folders`.
        filename: how the file is called in tracebacks.
        entry: the class to use; by default the last one that looks like an environment.
        config: keyword arguments of its constructor.
        module: what to import where there is no `source`.
        python: the interpreter (3.10 or newer), without its site-packages; None is the service's own.
        folders: where imports are looked for, before the standard library; read-only.
    """

    source: str | None
    filename: str = "environment.py"
    entry: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    module: str | None = None
    python: Path | None = None
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """A sandbox that runs texts of Python: call "run" with {source, stdin, max_output}, which answers {stdout, stderr,
    exit, cut}. One after the other in the same process; close it after one text if they must not meet. Call "cell" with
    {source, seed, cpu_s, max_output, files, removed, received, max_bytes} runs a text in an interpreter that keeps its
    variables, and answers {files, removed, left_out} too (see inside/interpreter.py).
    """

    python: Path | None = None
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ShellProgram:
    """A sandbox that starts programs: those of the machine's /usr, in a root of its own, where all but the system's
    folders is empty and may be written. It needs a service that is root's, and namespaces. What it is asked:
    inside/shell.py.
    """

    python: Path | None = None
    folders: tuple[Path, ...] = ()


type Program = EnvironmentProgram | ScriptProgram | ShellProgram
