"""Generated text-to-SQL tasks: a small database from one of several domains, a question, and its query.

They need no download and are unlimited in number. The question and the CREATE statements hold everything that the query
needs; the rows only serve to judge it.
"""

# ruff: noqa: S608 - every part of these queries is made here

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from volley_environments.text_to_sql.data import SqlTask


@dataclass(frozen=True, slots=True)
class Domain:
    """Two tables: things with a name, a kind and a number, and their events with a year and an amount.

    Names are those of the CREATE statements, and the questions use them unchanged.
    """

    things: str
    kind: str
    kinds: Sequence[str]
    number: str
    low: int
    high: int
    events: str
    amount: str
    names: Sequence[str]

    @property
    def key(self) -> str:
        return f"{self.things}_id"

    @property
    def create(self) -> str:
        return (
            f"CREATE TABLE {self.things} (id INTEGER PRIMARY KEY, name TEXT, {self.kind} TEXT,"
            f" {self.number} INTEGER);\n"
            f"CREATE TABLE {self.events} (id INTEGER PRIMARY KEY, {self.key} INTEGER REFERENCES {self.things}(id),"
            f" year INTEGER, {self.amount} INTEGER);"
        )


_PEOPLE = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ines",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Nils",
    "Omar",
    "Pia",
    "Quin",
    "Rosa",
    "Sam",
    "Tia",
]
_PLACES = [
    "Alder",
    "Birch",
    "Cedar",
    "Dune",
    "Elm",
    "Fjord",
    "Grove",
    "Heath",
    "Inlet",
    "Jetty",
    "Knoll",
    "Lake",
    "Marsh",
    "North",
    "Oak",
    "Pine",
    "Ridge",
    "Shore",
]
_CITIES = ("Oslo", "Lima", "Kyoto", "Cairo", "Quito")
DOMAINS = (
    Domain("customers", "city", _CITIES, "age", 18, 80, "orders", "price", _PEOPLE),
    Domain("students", "major", ("physics", "law", "music", "biology"), "age", 17, 40, "exams", "points", _PEOPLE),
    Domain(
        "employees",
        "department",
        ("sales", "legal", "research", "support"),
        "salary",
        20,
        120,
        "trips",
        "cost",
        _PEOPLE,
    ),
    Domain("players", "team", ("reds", "blues", "greens", "whites"), "height", 150, 210, "matches", "goals", _PEOPLE),
    Domain("parks", "region", ("north", "south", "east", "west"), "hectares", 5, 400, "visits", "visitors", _PLACES),
    Domain("ships", "flag", ("Norway", "Panama", "Greece", "Japan"), "length", 20, 300, "voyages", "cargo", _PLACES),
)
_YEARS = range(2015, 2025)

type Ask = Callable[[Domain, random.Random], tuple[str, str]]


def sample(seed: int) -> SqlTask | None:
    """The task of a seed; None if its query gives no row, because then almost any other query would pass."""
    dice = random.Random(seed)
    domain = dice.choice(DOMAINS)
    rows = _rows(domain, dice)
    question, sql = dice.choice(_QUESTIONS)(domain, dice)
    task = SqlTask(question, sql, {"schema": f"{domain.create}\n{rows}"}, domain.create)
    return task if _gives_rows(task) else None


def _rows(domain: Domain, dice: random.Random) -> str:
    names = dice.sample(list(domain.names), dice.randint(8, 12))
    things = [
        f"({i}, '{name}', '{dice.choice(domain.kinds)}', {dice.randint(domain.low, domain.high)})"
        for i, name in enumerate(names, 1)
    ]
    events = [
        f"({i}, {dice.randint(1, len(names))}, {dice.choice(_YEARS)}, {dice.randint(1, 500)})"
        for i in range(1, dice.randint(20, 40))
    ]
    return (
        f"INSERT INTO {domain.things} VALUES {', '.join(things)};\n"
        f"INSERT INTO {domain.events} VALUES {', '.join(events)};"
    )


def _gives_rows(task: SqlTask) -> bool:
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(task.source["schema"])
        rows = connection.execute(task.sql).fetchall()
    connection.close()
    return any(value is not None for row in rows for value in row)


def _count(d: Domain, dice: random.Random) -> tuple[str, str]:
    kind, limit = dice.choice(d.kinds), dice.randint(d.low, d.high)
    return (
        f"How many {d.things} with {d.kind} {kind} have {d.number} of at least {limit}?",
        f"SELECT COUNT(*) FROM {d.things} WHERE {d.kind} = '{kind}' AND {d.number} >= {limit}",
    )


def _names(d: Domain, dice: random.Random) -> tuple[str, str]:
    low = dice.randint(d.low, d.high - 1)
    high = dice.randint(low + 1, d.high)
    return (
        f"What are the names of the {d.things} whose {d.number} is between {low} and {high}, both included?",
        f"SELECT name FROM {d.things} WHERE {d.number} BETWEEN {low} AND {high}",
    )


def _extreme(d: Domain, dice: random.Random) -> tuple[str, str]:
    kind, (word, aggregate) = dice.choice(d.kinds), dice.choice([("largest", "MAX"), ("smallest", "MIN")])
    limit = dice.randint(d.low, d.high)
    below = f"{d.kind} = '{kind}' AND {d.number} <> {limit}"
    return (
        f"Of the {d.things} with {d.kind} {kind}, leaving out those whose {d.number} is {limit}:"
        f" which {d.number} is the {word}?",
        f"SELECT {aggregate}({d.number}) FROM {d.things} WHERE {below}",
    )


def _per_kind(d: Domain, dice: random.Random) -> tuple[str, str]:
    limit = dice.randint(d.low, d.high)
    return (
        f"For each {d.kind}, how many {d.things} have {d.number} below {limit}? Give {d.kind} and count, and leave out"
        " those without any.",
        f"SELECT {d.kind}, COUNT(*) FROM {d.things} WHERE {d.number} < {limit} GROUP BY {d.kind}",
    )


def _total(d: Domain, dice: random.Random) -> tuple[str, str]:
    kind, year = dice.choice(d.kinds), dice.choice(_YEARS)
    least = dice.randint(1, 200)
    return (
        f"What is the total {d.amount} of the {d.events} from {year} on that belong to {d.things} with {d.kind} {kind},"
        f" counting only {d.events} with {d.amount} of at least {least}?",
        f"SELECT SUM(e.{d.amount}) FROM {d.events} e JOIN {d.things} t ON t.id = e.{d.key}"
        f" WHERE t.{d.kind} = '{kind}' AND e.year >= {year} AND e.{d.amount} >= {least}",
    )


def _busy(d: Domain, dice: random.Random) -> tuple[str, str]:
    n, least = dice.randint(1, 4), dice.randint(1, 300)
    return (
        f"Which {d.things}, by name, have at least {n} {d.events} with {d.amount} above {least}?",
        f"SELECT t.name FROM {d.things} t JOIN {d.events} e ON t.id = e.{d.key} WHERE e.{d.amount} > {least}"
        f" GROUP BY t.id HAVING COUNT(*) >= {n}",
    )


def _without(d: Domain, dice: random.Random) -> tuple[str, str]:
    year, least = dice.choice(_YEARS), dice.randint(1, 300)
    return (
        f"Which {d.things}, by name, have none of the {d.events} after {year} with {d.amount} above {least}?",
        f"SELECT name FROM {d.things} WHERE id NOT IN (SELECT {d.key} FROM {d.events} WHERE year > {year}"
        f" AND {d.amount} > {least})",
    )


def _top(d: Domain, dice: random.Random) -> tuple[str, str]:
    n, year = dice.randint(2, 5), dice.choice(_YEARS)
    least = dice.randint(1, 200)
    return (
        f"Which {n} {d.things}, by name, have the highest total {d.amount} over the {d.events} before {year} with"
        f" {d.amount} of at least {least}? Give name and total; of equals, the smaller id comes first.",
        f"SELECT t.name, SUM(e.{d.amount}) FROM {d.things} t JOIN {d.events} e ON t.id = e.{d.key}"
        f" WHERE e.year < {year} AND e.{d.amount} >= {least} GROUP BY t.id"
        f" ORDER BY SUM(e.{d.amount}) DESC, t.id LIMIT {n}",
    )


_QUESTIONS: tuple[Ask, ...] = (_count, _names, _extreme, _per_kind, _total, _busy, _without, _top)
