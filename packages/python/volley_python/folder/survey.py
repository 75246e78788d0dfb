"""Check the sizes and types of a run's files before any is read.

A folder from elsewhere may hold links to other files, FIFOs, sparse files of a terabyte, or records that take hours
and all memory to read. No run writes those: they are reported, and nothing is read. Reading the rest takes time and
memory in proportion to the bytes on the disk.

A file may have two hard links: a restarted trainer gives the files of its checkpoint another name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared.errors import ConfigError
from shared.files.reading import open_file
from shared.run import trust
from shared.run.folder import RunFolder

MAX_ENTRIES = 100_000
"""Files and folders; enough for 40,000 steps and a hundred checkpoints."""
MAX_DEPTH = 12
MAX_PARSED_BYTES = 640 * 2**20
"""Memory that all records together may take, in bytes."""
_VALUE_BYTES = 60
"""Memory of one JSON value: at least a reference and the value, in bytes."""
_MARKS = b",[{\n"
_MOST_NAMED = 20
_LEAST_SPARSE = 2**20
_SPARSE_FACTOR = 8
_BLOCK_BYTES = 2**22
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_RECORDS = (".json", ".jsonl", ".yaml")
_HINT = "if the folder is yours and this is right, add --trust"


@dataclass(slots=True)
class Survey:
    """Bytes on the disk, counting each file once; `problems` holds the first (file, reason) pairs."""

    records: int = 0
    archives: int = 0
    others: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def check(folder: RunFolder) -> None:
    """Raise ConfigError with the first file that no run creates, unless the folder is trusted."""
    if not trust.is_accepted(folder) and (found := look(folder).problems):
        name, reason = found[0]
        raise ConfigError(f"{folder.path / name} {reason}", _HINT)


def look(folder: RunFolder) -> Survey:
    """Sum the sizes of the files that commands read. Files that cannot be examined are left to their reader."""
    folder = RunFolder(folder.path.absolute())
    found, seen, parsed = Survey(), dict[tuple[int, int], int](), 0  # seen: what a file takes in memory
    start = len(os.path.join(folder.path, ""))
    streamed = {folder.samples, folder.demonstrations, folder.handovers}  # no reader holds all of one
    for n, (path, status) in enumerate(_entries(folder), start=1):
        name = path[start:]
        if n > MAX_ENTRIES:
            found.problems.append((name.partition("/")[0], f"holds more than {MAX_ENTRIES} files, as no run does"))
            break
        file = status.st_dev, status.st_ino
        if (reason := _kind(name, status)) is not None:
            found.problems.append((name, reason))
        elif stat.S_ISREG(status.st_mode) and file not in seen:
            seen[file] = 0
            if (reason := _holes(path, status)) is not None:
                found.problems.append((name, reason))
            elif name.endswith(_RECORDS):
                found.records += status.st_size
                if Path(path) not in streamed:
                    seen[file] = _parsed_bytes(path, MAX_PARSED_BYTES - parsed)
            elif name.endswith(".zst"):
                found.archives += status.st_size
            else:
                found.others += status.st_size
        parsed += seen.get(file, 0)  # each of its names is read
        if parsed > MAX_PARSED_BYTES:
            more = f"takes, with the other records, more than {MAX_PARSED_BYTES >> 20} MiB of memory to read"
            found.problems.append((name, more))
            break
        if len(found.problems) >= _MOST_NAMED:
            break
    return found


def _entries(folder: RunFolder) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the run's records, and all files of its checkpoints, groups and model; follow no links."""
    trees = (folder.checkpoints, folder.archive, folder.refused_groups, folder.model)
    files = (
        *(folder.config, folder.record, folder.services, folder.processes, folder.summary, folder.secrets),
        *(folder.metrics, folder.sft, folder.ledger, folder.refused, folder.evals, folder.mixture, folder.handovers),
        *(folder.demonstrations, folder.samples, folder.environments, folder.environment_data),
        *(folder.saved, folder.bucket, folder.run_id, folder.recorded_run_id, folder.teacher),
        *(folder.judges, folder.soak),
    )
    waiting = list[str]()
    for path in map(str, (*files, *trees)):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        yield path, status
        if stat.S_ISDIR(status.st_mode) and Path(path) in trees:
            waiting.append(path)
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    yield entry.path, status
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except OSError:
            continue


def _kind(name: str, status: os.stat_result) -> str | None:
    """Return why no run creates an entry of this type or depth; None if one may."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFLNK:
        return "is a link: it is not followed"
    if kind in _KINDS:
        return f"is {_KINDS[kind]}, not a file"
    if name.count("/") > MAX_DEPTH:
        return f"lies more than {MAX_DEPTH} folders deep"
    return None


def _holes(path: str, status: os.stat_result) -> str | None:
    """Describe a sparse file, whose size far exceeds its bytes on disk; None for any other file."""
    if status.st_size < _LEAST_SPARSE or status.st_blocks * 512 * _SPARSE_FACTOR >= status.st_size:
        return None
    try:
        with open_file(Path(path)) as file:
            if os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= status.st_size:
                return None  # this file system does not report holes
    except OSError:
        return None
    return f"is sparse: it claims {status.st_size} bytes, of which {status.st_blocks * 512} are there"


def _parsed_bytes(path: str, most: int) -> int:
    """Estimate the memory that reading a record takes, in bytes; stop once it exceeds `most`."""
    total = 0
    try:
        with open_file(Path(path)) as file:
            while total <= most and (block := np.frombuffer(file.read(_BLOCK_BYTES), np.uint8)).size:
                total += block.size + _VALUE_BYTES * sum(int(np.count_nonzero(block == mark)) for mark in _MARKS)
    except OSError:
        return 0
    return total
