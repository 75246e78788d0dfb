"""A user's rows as tasks: prompt, columns, checks of types, and the split into training and held-out tasks.

Invariants: the split depends on content alone, and no prompt is in both parts. Memory is bounded: of more rows than an
environment holds, those with the smallest digests are used.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shared.errors import ConfigError
from volley_data.sources import Rows

PROMPTS = ("prompt", "messages", "question")
"""Columns that hold the prompt, the first that there is."""
MAX_BYTES = 15 * 2**20
"""Bytes of the rows of one split in an environment."""
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, order=True)
class RowTask:
    """One row. `prompt` is the digest of its prompt, `number` its position, `line` the row as JSON."""

    prompt: str
    digest: str
    number: int
    line: bytes
    characters: int


@dataclass(frozen=True, slots=True)
class RowTasks:
    """Rows of one split that an environment holds, in their order, of `n_found`; names of their columns."""

    tasks: Sequence[RowTask]
    n_found: int
    columns: Sequence[str]


class ColumnTypes:
    """ColumnTypes of the columns so far, and where each was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str]] = {}

    def check(self, columns: Mapping[str, Any], place: str) -> None:
        """Raise ConfigError if a column has another type than in an earlier row."""
        for name, value in columns.items():
            if value is None:
                continue
            kind = _KINDS[type(value)]
            known, first = self._seen.setdefault(name, (kind, place))
            if known != kind:
                raise ConfigError(
                    f"column {name} is {known} on {first}, and {kind} on {place}", "give it one type in all rows"
                )


def read(rows: Rows, shown: str, names: Mapping[str, str], types: ColumnTypes) -> RowTasks:
    """Read the rows of a split. Raises ConfigError naming the row that is no task.

    Args:
        names: column of the file by its new name.
    """
    heap = list[tuple[int, int, RowTask]]()
    columns, n_bytes, n_found = dict[str, None](), 0, 0
    for number, (place, row) in enumerate(rows):
        n_found += 1
        place = place.rpartition("/")[2]  # without the folder, which is no content
        task, found = _task(row, place, number, names, types)
        columns |= dict.fromkeys(found)
        heapq.heappush(heap, (-int(task.prompt, 16), number, task))
        n_bytes += len(task.line)
        while n_bytes > MAX_BYTES:
            n_bytes -= len(heapq.heappop(heap)[2].line)
    if not n_found:
        raise ConfigError(f"{shown} is empty", "give a file with one task in each row")
    tasks = sorted((task for _, _, task in heap), key=lambda task: task.number)
    return RowTasks(tasks, n_found, tuple(columns))


def _task(
    row: Any, place: str, number: int, names: Mapping[str, str], types: ColumnTypes
) -> tuple[RowTask, Mapping[str, Any]]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is {_KINDS.get(type(row), 'null')}, not an object", 'write {"prompt": "…", …}')
    columns = _renamed(row, names, place)
    key = next((name for name in PROMPTS if columns.get(name) is not None), None)
    if key is None:
        known = [name for name in PROMPTS if name in columns]
        if known:
            raise ConfigError(f"{place}: {known[0]} is empty", "remove the row, or fill it")
        first = next(iter(columns), "COLUMN")
        raise ConfigError(
            f"{place} has none of the columns prompt, messages, question; it has {', '.join(columns) or 'none'}",
            f"name the one with the prompt: --columns prompt={first}",
        )
    types.check(columns, place)
    messages = _messages(columns[key], f"{place}: {key}")
    prompt = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)
    whole = {"messages": messages, "columns": columns, "prompt": key, "place": place}
    try:
        line = orjson.dumps(whole)
    except TypeError as error:
        raise ConfigError(f"{place} cannot be written as JSON: {error}") from error
    if len(line) > MAX_BYTES:
        raise ConfigError(f"{place} has {len(line)} bytes; the limit is {MAX_BYTES}", "remove the row")
    digests = [hashlib.blake2b(one, digest_size=16).hexdigest() for one in (prompt, line)]
    return RowTask(digests[0], digests[1], number, line, sum(len(one["content"]) for one in messages)), columns


def _renamed(row: Mapping[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    """The row's columns with new names. Raises ConfigError."""
    if missing := [column for column in names.values() if column not in row]:
        raise ConfigError(f"{place} has no column {missing[0]}", f"--columns may name: {', '.join(row)}")
    left = {name: value for name, value in row.items() if name not in names.values() and name not in names}
    return {**{new: row[column] for new, column in names.items()}, **left}


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Messages of a prompt, without the answers at its end. Raises ConfigError."""
    if not isinstance(value, str | list):
        raise ConfigError(
            f"{where} is {_KINDS[type(value)]}", "give a text, or a list of messages with role and content"
        )
    messages: list[Any] = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in _ROLES
        if not (known and isinstance(message.get("content"), str)):
            raise ConfigError(
                f"{where} has the message {str(message)[:60]!r}",
                'each is {"role": "user", "content": "text"}, of the roles system, user, assistant and tool',
            )
    plain = [{"role": one["role"], "content": one["content"]} for one in messages]
    while plain and plain[-1]["role"] == "assistant":
        plain.pop()
    if not plain or not any(one["content"].strip() for one in plain):
        raise ConfigError(f"{where} is empty", "remove the row, or fill it")
    return plain


def held_out(tasks: RowTasks, share: float, shown: str) -> tuple[RowTasks, RowTasks]:
    """Hold out a share of the prompts, those with the smallest digests. Raises ConfigError if none would be left."""
    prompts = sorted({task.prompt for task in tasks.tasks})
    n = max(1, round(share * len(prompts)))
    if n >= len(prompts):
        raise ConfigError(
            f"{shown} has {len(prompts)} different prompt{'s' * (len(prompts) != 1)}: a share of {share:g} leaves none"
            " to train on",
            "give more rows, or hold out none: --eval-share 0",
        )
    chosen = set(prompts[:n])
    return split_by(tasks, chosen)


def split_by(tasks: RowTasks, prompts: set[str]) -> tuple[RowTasks, RowTasks]:
    """Split into the tasks without and with these prompts."""
    without = tuple(task for task in tasks.tasks if task.prompt not in prompts)
    within = tuple(task for task in tasks.tasks if task.prompt in prompts)
    return RowTasks(without, tasks.n_found, tasks.columns), RowTasks(within, tasks.n_found, tasks.columns)


def shrunk(tasks: RowTasks, share: float) -> RowTasks:
    """Keep a share of the tasks: those with the smallest digests."""
    kept = {task.number for task in sorted(tasks.tasks)[: max(1, int(share * len(tasks.tasks)))]}
    return RowTasks(tuple(task for task in tasks.tasks if task.number in kept), tasks.n_found, tasks.columns)


def longest(parts: Sequence[RowTasks], n: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of the `n` prompts with most characters."""
    every = (task for part in parts for task in part.tasks)
    for task in heapq.nlargest(n, every, key=lambda task: task.characters):
        yield orjson.loads(task.line)["messages"]
