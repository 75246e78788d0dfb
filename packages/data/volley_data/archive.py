"""The environment as a zip file: rows, reward functions, tools and the template class.

Equal content gives equal bytes, so the digest of the file is that of everything in it.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from shared.errors import ConfigError
from volley_data.functions import RewardFunction, ToolFile, dependencies_of, files_of, module_of
from volley_data.rows import RowTasks, shrunk
from volley_python.submissions.packing import MAX_BYTES
from volley_serving.templates import tool_text

ENTRY = "volley_rows:OwnRows"
_TEMPLATE = Path(__file__).parent / "template"
_SINCE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PackedData:
    """Bytes of the archive, and the tasks of each split that fit into it."""

    content: bytes
    splits: Mapping[str, RowTasks]


def pack(splits: Mapping[str, RowTasks], rewards: Sequence[RewardFunction], tools: ToolFile | None) -> PackedData:
    """Make the archive. It holds fewer rows if all are too large. Raises ConfigError."""
    code = _code(rewards, tools)
    while True:
        files = {**code, **_data(splits), "volley_rows.json": _spec(splits, rewards, tools)}
        content = _zipped(files)
        if len(content) <= MAX_BYTES:
            return PackedData(content, splits)
        if all(len(part.tasks) < 2 for part in splits.values()):
            raise ConfigError(f"the reward's files have more than {MAX_BYTES} bytes", "import less from their folder")
        share = 0.95 * MAX_BYTES / len(content)
        splits = {split: shrunk(part, share) if part.tasks else part for split, part in splits.items()}


def _code(rewards: Sequence[RewardFunction], tools: ToolFile | None) -> dict[str, bytes]:
    """Files of the template and the user. Raises ConfigError if two have one name."""
    found = {file.name: file.read_bytes() for file in sorted(_TEMPLATE.glob("*.py"))}
    found["volley_tool_text.py"] = Path(tool_text.__file__).read_bytes()
    own = dict[str, bytes]()
    for file in [*(one.file for one in rewards), *([tools.file] if tools else [])]:
        for name, content in files_of(file).items():
            if found.get(name, content) != content:
                raise ConfigError(f"two files are called {name}", "rename one: all are packed into one folder")
            found[name] = own[name] = content
    depend = dependencies_of(own)
    found["pyproject.toml"] = (
        f'[project]\nname = "rows"\nversion = "1"\ndependencies = {orjson.dumps(depend).decode()}\n'
        f'[project.entry-points."volley.environments"]\nrows = "{ENTRY}"\n'
    ).encode()
    return found


def _data(splits: Mapping[str, RowTasks]) -> dict[str, bytes]:
    found = dict[str, bytes]()
    for split, part in splits.items():
        lines = [task.line + b"\n" for task in part.tasks]
        offsets, at = list[bytes](), 0
        for line in lines:
            offsets.append(struct.pack("<Q", at))
            at += len(line)
        found |= {f"rows_{split}.jsonl": b"".join(lines), f"rows_{split}.offsets": b"".join(offsets)}
    return found


def _spec(splits: Mapping[str, RowTasks], rewards: Sequence[RewardFunction], tools: ToolFile | None) -> bytes:
    names = Counter(one.name for one in rewards)
    labels = [one.name if names[one.name] == 1 else f"{module_of(one.file)}.{one.name}" for one in rewards]
    if len({*labels}) < len(labels):
        twice = next(label for label, n in Counter(labels).items() if n > 1)
        raise ConfigError(f"the reward {twice} is given twice", "give it once, with a weight: FILE.py:NAME=2")
    found = {
        "splits": {split: len(part.tasks) for split, part in splits.items()},
        "rewards": [one.spec(module_of(one.file), label) for one, label in zip(rewards, labels, strict=True)],
        "tools": None if tools is None else tools.spec(),
    }
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)


def _zipped(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _SINCE), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def plain_name(data: str) -> str:
    """Name for run and environment, from a path or a hub id."""
    stem = Path(data.partition(":")[0]).expanduser().name.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "_", stem).lstrip("_-")[:40] or "data"
