"""Verify refused.jsonl and refused/: each refused step is recorded with its groups.

The trainer moves the groups before it writes the line, and the line before a ticket ends for it
(services.trainer.loop.refusals). A crash between file and line ends the epoch: the last file of an epoch may lack
its line, if nothing of this epoch came after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shared import codec
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run import archive
from shared.run.archive import Spend
from shared.run.folder import RunFolder
from shared.run.ledger import NONFINITE, Line
from shared.types import Group, WeightVersion
from volley_proof.verify.violation import Violation, ViolationKind

_MOST_TICKETS = 1_000_000
_BEGINNING = b'{"version":"e'

type Refused = tuple[list[int], list[str]]
"""Tickets and digests of the groups of a refused step, in order."""


def check(folder: RunFolder, voids: Iterable[Line], run: str, spend: Spend) -> Iterator[Violation]:
    """Compare lines, files and the ledger's `nonfinite` lines. Reads one group at a time."""
    file, groups = folder.refused.name, folder.refused_groups.name
    made = archive.versions(folder.archive)
    lines: dict[WeightVersion, list[Refused]] = defaultdict(list)
    n = 0
    for one in _lines(folder.refused):
        if isinstance(one, Violation):
            yield one
            continue
        n += len(one[1][0])
        if n > _MOST_TICKETS:
            yield Violation(
                ViolationKind.LEDGER, f"it names more than {_MOST_TICKETS} tickets: no run refuses so many", file=file
            )
            break
        lines[one[0]].append(one[1])
    ended = {str(line["digest"]): line for line in voids if line["disposition"] == NONFINITE}
    kept = archive.refused(folder.refused_groups)
    newest = {version.epoch: version for version in made}
    last = {version.epoch: path for version, path in kept}
    for version, path in kept:
        name = path.relative_to(folder.path).as_posix()
        try:
            found = _kept(path, run, version, spend)
        except DecodeError as error:
            yield Violation(ViolationKind.ARCHIVE, error.detail, step=version.step, file=name)
            lines[version][:1] = []
            continue
        has_ended = any(digest in ended for digest in found[1])
        for digest in found[1]:
            ended.pop(digest, None)
        if lines[version]:
            if lines[version].pop(0) != found:
                yield Violation(
                    ViolationKind.ARCHIVE, f"holds other groups than {file} says", step=version.step, file=name
                )
        elif (
            has_ended or last[version.epoch] != path or newest.get(version.epoch, version) > version or version in made
        ):
            yield Violation(ViolationKind.ARCHIVE, f"{file} has no line for it", step=version.step, file=name)
    for version, missing in lines.items():
        for tickets, _ in missing:
            detail = f"says that {version} was refused, with tickets {tickets[:20]}, but {groups}/ has no file for it"
            yield Violation(ViolationKind.ARCHIVE, detail, step=version.step, file=file)
    for line in ended.values():
        yield Violation(ViolationKind.ARCHIVE, f"its group is in no file of {groups}/", line["ticket"], line["step"])


def _lines(path: Path) -> Iterator[tuple[WeightVersion, Refused] | Violation]:
    """Yield refused steps. A line cut by a crash is skipped if another follows it: its file then lacks a line."""
    torn: Violation | None = None
    try:
        for number, text in enumerate(whole_lines(path), start=1):
            torn = None
            try:
                yield _parsed(codec.from_record(text, "a line of refused steps"))
            except (DecodeError, KeyError, TypeError):
                bad = Violation(ViolationKind.LEDGER, f"line {number} is not a line of refused steps", file=path.name)
                if _BEGINNING.startswith(text[: len(_BEGINNING)]) and not text.endswith(b"}"):
                    torn = bad
                else:
                    yield bad
    except OSError as error:
        yield Violation(ViolationKind.LEDGER, f"it cannot be read: {error.strerror}", file=path.name)
    if torn is not None:
        yield torn


def _parsed(line: Mapping[str, Any]) -> tuple[WeightVersion, Refused]:
    """Raises KeyError, TypeError or DecodeError."""
    version, base = WeightVersion.parse(line["version"]), WeightVersion.parse(line["base"])
    tickets, digests, what = line["tickets"], line["digests"], line["what"]
    if (line["step"], version) != (version.step, WeightVersion(base.epoch, base.step + 1)) or line["action"] not in (
        "stop",
        "skip",
    ):
        raise DecodeError("step, base and action contradict each other")
    if not (_all(tickets, int) and _all(digests, str) and _all(what, str) and len(tickets) == len(digests)):
        raise DecodeError("tickets, digests or the list of non-finite numbers are malformed")
    return version, (tickets, digests)


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(type(value) is kind for value in values)


def _kept(path: Path, run: str, version: WeightVersion, spend: Spend) -> Refused:
    """Raises DecodeError."""
    tickets, digests = list[int](), list[str]()
    for payload in archive.read_file(path, run, version, spend):
        tickets.append(Group.decode(payload).ticket)
        digests.append(archive.digest(payload))
    return tickets, digests
