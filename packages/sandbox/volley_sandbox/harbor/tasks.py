"""Task folders in Harbor's format: found in an archive, read by Harbor itself.

An archive holds one such folder, or one for each task, at any depth; tasks below a folder `eval/` are held out.

Invariant: each task.toml of an archive is a task, a file of a task, or an error; none is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.env.episode_types import EVAL, TRAIN
from shared.errors import InputError
from volley_python.submissions.packing import TASK_FILE, TASK_PARTS

MAX_INSTRUCTION = 2**18
"""Characters of an instruction."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task.

    `instruction` is the first step's, if it has several. `commands_s` are the seconds for the commands of each step,
    None without a limit.
    """

    name: str
    folder: Path
    instruction: str
    commands_s: tuple[float | None, ...]

    def environment_digest(self) -> str:
        """SHA-256 of task.toml and environment/, which make the containers. Blocks on disk."""
        digest = hashlib.sha256()
        for path in [self.folder / TASK_FILE, *sorted((self.folder / "environment").rglob("*"))]:
            if path.is_file():
                digest.update(f"{path.relative_to(self.folder)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()


def is_task_archive(top: Path) -> bool:
    """True if an unpacked archive holds task folders outside of Python packages."""
    return any(not any((above / "__init__.py").exists() for above in _up(folder, top)) for folder in _folders(top))


def read_tasks(
    top: Path, read: Callable[[Sequence[Path]], Sequence[Mapping[str, Any]]]
) -> Mapping[str, Sequence[HarborTask]]:
    """Read the tasks of an unpacked archive by split, sorted by name. Blocks on disk.

    Args:
        read: Harbor's reader (see `Containers.read`).

    Raises InputError naming the task and its fault.
    """
    found: dict[str, list[HarborTask]] = {TRAIN: [], EVAL: []}
    every = _folders(top)
    folders = [folder for folder in every if not _is_part(folder, top, every)]
    for folder, row in zip(folders, read(folders), strict=True):
        name = _name(folder, top)
        if fault := row.get("fault"):
            raise InputError(f"the task {name}: {fault}", "docs/harbor.md describes task folders")
        text = str(row["instruction"])
        if not text.strip():
            raise InputError(f"the task {name}: the instruction is empty", "write the task into instruction.md")
        if len(text) > MAX_INSTRUCTION:
            raise InputError(
                f"the task {name}: the instruction has {len(text)} characters", f"write 1 to {MAX_INSTRUCTION}"
            )
        split = EVAL if EVAL in folder.relative_to(top).parts[:-1] else TRAIN
        found[split].append(HarborTask(name, folder, text, tuple(row["commands_s"])))
    if not found[TRAIN]:
        raise InputError("all tasks are in eval/, so there are none to train on", "move training tasks out of eval/")
    return {split: tasks for split, tasks in found.items() if tasks}


def _is_part(folder: Path, top: Path, folders: Sequence[Path]) -> bool:
    """True for a folder among the files of another task. Raises InputError for a task inside another one."""
    holder = next((above for above in _up(folder, top)[1:] if above in folders), None)
    if holder is None:
        return False
    if folder.relative_to(holder).parts[0] in TASK_PARTS:
        return True
    raise InputError(
        f"the task {_name(folder, top)} is inside the task {_name(holder, top)}", "move it next to that task"
    )


def _folders(top: Path) -> Sequence[Path]:
    """Folders with a task.toml, in the order of their names."""
    return sorted(path.parent for path in top.rglob(TASK_FILE) if path.is_file())


def _up(folder: Path, top: Path) -> Sequence[Path]:
    """`folder` and its parents up to `top`."""
    return [above for above in (folder, *folder.parents) if above == top or top in above.parents]


def _name(folder: Path, top: Path) -> str:
    return str(folder.relative_to(top)) if folder != top else "task"
