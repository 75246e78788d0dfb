"""Limits of one sandbox, and the programs that it can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_SOURCE = 2**20
"""Characters of one submitted file."""


type SandboxKind = Literal["plain", "agent"]
"""Abilities of a sandbox: `agent` starts programs, and has a loopback network with one listening socket."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one sandbox over its whole life.

    Args:
        cpu_s: seconds of CPU time.
        memory_mb: address space, in MiB; a small program takes about 60 MiB.
        threads: threads at once, including the first.
        file_mb: largest file that it may write, in MiB.
        disk_mb: total size of its private folder, in MiB.
        open_files: open descriptors at once.
        frame_bytes: largest answer to one call.
        log_bytes: bytes kept from the end of its output. A sandbox that writes more than LOG_FACTOR times as much is
        killed.
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
        source: text of a Python file; None to import `module` from one of `folders`.
        filename: name of the file in tracebacks.
        entry: the class to use; by default the last one with an environment's methods.
        config: keyword arguments of its constructor.
        module: module to import if there is no `source`.
        python: the interpreter (3.10 or newer), without its site-packages; None is the service's own.
        folders: read-only folders searched for imports before the standard library.
        kind: `agent` if its episodes start a program. Such a sandbox has a root of its own in which everything except
            the system's folders is empty and writable; it needs namespaces.
    """

    source: str | None
    filename: str = "environment.py"
    entry: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    module: str | None = None
    python: Path | None = None
    folders: tuple[Path, ...] = ()
    kind: SandboxKind = "plain"


@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """A sandbox that runs Python texts one after the other in the same process.

    Call "run" with {source, stdin, max_output} answers {stdout, stderr, exit, cut}; close the sandbox after one text to
    isolate texts. Call "cell" with {source, seed, cpu_s, max_output, files, removed, received, max_bytes} runs a text
    in an interpreter that keeps its variables, and also answers {files, removed, left_out} (see inside/interpreter.py).
    """

    python: Path | None = None
    folders: tuple[Path, ...] = ()
    kind: SandboxKind = "plain"


type Program = EnvironmentProgram | ScriptProgram
