"""Known vulnerabilities of locked packages, in a dated file of the project, for machines without a network.

`make audit ARGS=--refresh` writes the file anew from the database of osv.dev: all advisories on the packages of
uv.lock.
"""

from __future__ import annotations

import datetime
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from packaging.version import InvalidVersion, Version

FILE = Path(__file__).with_name("advisories.json")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Advisory:
    """One range of affected versions: from `introduced` on, before `fixed` and up to `last_affected`.

    Null for an end that the database does not tell; a single version is the first and the last.
    """

    package: str
    id: str
    introduced: str
    fixed: str | None
    aliases: tuple[str, ...] = ()
    last_affected: str | None = None

    @property
    def ids(self) -> set[str]:
        return {self.id, *self.aliases}

    def affects(self, version: str) -> bool:
        asked = Version(version)
        return (
            Version(self.introduced) <= asked
            and (self.fixed is None or asked < Version(self.fixed))
            and (self.last_affected is None or asked <= Version(self.last_affected))
        )


@dataclass(frozen=True, slots=True)
class Advisories:
    """Advisories, and the day on which they were collected."""

    date: datetime.date
    known: tuple[Advisory, ...]

    @classmethod
    def read(cls, path: Path = FILE) -> Advisories:
        found = orjson.loads(path.read_bytes())
        return cls(
            datetime.date.fromisoformat(found["date"]),
            tuple(Advisory(**(one | {"aliases": tuple(one["aliases"])})) for one in found["advisories"]),
        )

    def write(self, path: Path = FILE) -> None:
        """Write one advisory a line."""
        lines = ",\n".join("  " + orjson.dumps(asdict(one)).decode() for one in self.known)
        path.write_text(f'{{"date": "{self.date}", "advisories": [\n{lines}\n]}}\n', encoding="utf-8")

    def found(self, pins: Iterable[tuple[str, str]], accepted: Mapping[str, str]) -> list[str]:
        """Return one line per advisory that affects a pinned package and is not accepted."""
        return [
            f"{name} {version}: {one.id}, fixed in {one.fixed or 'no version'}"
            for name, version in pins
            for one in self.known
            if one.package == name and not one.ids & accepted.keys() and one.affects(version)
        ]


def locked(lock: Path) -> list[tuple[str, str]]:
    """Return name and version of every package in a uv.lock, but for the project itself."""
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["package"]
    return sorted((one["name"], one["version"]) for one in packages if "registry" in one["source"])


def download(names: Iterable[str], database: str) -> Advisories:
    """Ask the database for all advisories on the packages. Raises OSError."""
    found = {one for name in names for answer in _pages(name, database) for one in _ranges(name, answer)}
    return Advisories(
        datetime.datetime.now(datetime.UTC).date(), tuple(sorted(found, key=lambda one: (one.package, str(one))))
    )


def _pages(name: str, database: str) -> Iterator[Mapping[str, Any]]:
    token: str | None = ""
    while token is not None:
        asked = {"package": {"name": name, "ecosystem": "PyPI"}, **({"page_token": token} if token else {})}
        request = urllib.request.Request(f"{database}/v1/query", orjson.dumps(asked))  # noqa: S310 - ours, or a test's
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            page = orjson.loads(answer.read())
        yield page
        token = page.get("next_page_token")


def _ranges(name: str, answer: Mapping[str, Any]) -> Iterator[Advisory]:
    """Read the affected versions; of several databases' names for one advisory, those of the answer are kept.

    A version that is listed alone is a range of its own, unless another range has it.
    """
    for one in answer.get("vulns", ()):
        affected = [a for a in one.get("affected", ()) if a.get("package", {}).get("name", "").lower() == name]
        if "withdrawn" in one:
            continue
        id, aliases = one["id"], tuple(one.get("aliases", ()))
        found = [
            Advisory(name, id, first, fixed, aliases, last)
            for a in affected
            for r in a.get("ranges", ())
            if r["type"] == "ECOSYSTEM"
            for first, fixed, last in _ends(r["events"])
        ]
        yield from found
        for version in {v for a in affected for v in a.get("versions", ()) if _is_version(v)}:
            if not any(advisory.affects(version) for advisory in found):
                yield Advisory(name, id, version, None, aliases, version)


def _ends(events: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield `introduced`, `fixed` and `last_affected` of each range that the events describe."""
    introduced = "0"
    for event in [*events, {}]:
        introduced = event.get("introduced", introduced)
        if "introduced" not in event and introduced:
            if _is_version(introduced):
                yield introduced, event.get("fixed"), event.get("last_affected")
            introduced = ""


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
