"""Schemathesis against a service that listens on a real socket, in a thread of this process.

A third of the cases of an operation are valid by its schema, a third invalid, and a third noise: a case with headers,
query or body that no schema speaks of. In each, fields whose names are known take real values now and then, so that
cases reach what lies behind "not found". The same seed gives the same cases.
"""

from __future__ import annotations

import asyncio
import random
import string
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.openapi import checks  # noqa: F401 - registers the checks
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from shared import codec

REFUSALS = (429, 503, 507)
"""Answers that say "later", with Retry-After; no other status of 500 or more is allowed."""

_TOO_LARGE = 413
_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
_HEADERS = (
    "Content-Type",
    "Authorization",
    "Accept",
    "Content-Encoding",
    "Range",
    "Expect",
    "X-Forwarded-For",
    "Cookie",
    "Host",
)
_VALUES = (
    "application/msgpack",
    "application/json",
    "text/plain; charset=utf-16",
    "Bearer x",
    "gzip",
    "bytes=5-1",
    "*/*",
    "a" * 3000,
    "",
)
_MORE = 40
"""Cases of an operation that has not succeeded in its share of a small number, in each of several rounds."""
_ROUNDS = 5
_PROBLEM = "application/problem+json"


@schemathesis.serializer(codec.MEDIA_TYPE)
def _pack(_context: Any, value: Any) -> bytes:
    """Bytes as they are; what msgpack cannot carry becomes a body that is no msgpack."""
    if isinstance(value, bytes):
        return value
    with suppress(TypeError, ValueError, OverflowError):
        return codec.pack(value)
    return b"\xc1"


@schemathesis.deserializer(codec.MEDIA_TYPE)
def _unpack(_context: Any, response: Response) -> Any:
    return orjson.loads(orjson.dumps(codec.unpack(response.content), option=orjson.OPT_SERIALIZE_NUMPY))


@dataclass
class FuzzFindings:
    """`answers` counts by operation and status; `failures` holds the first of each kind, as text."""

    cases: int = 0
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    def statuses(self) -> dict[int, int]:
        total: Counter[int] = Counter()
        for (_, status), n in self.answers.items():
            total[status] += n
        return dict(sorted(total.items()))

    def never_succeeded(self) -> set[str]:
        """Operations whose every answer was an error: the fuzzing has not reached them."""
        return {name for name, _ in self.answers} - {name for name, status in self.answers if status < 300}


@contextmanager
def in_a_thread[T](open_it: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What an asynchronous context yields, while it lives on an event loop of another thread."""
    loop, opened, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    yielded: list[T] = []

    async def main() -> None:
        async with open_it() as value:
            yielded.append(value)
            opened.set()
            await stop.wait()

    def work() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            opened.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert opened.wait(120)
        assert yielded, "it could not be opened"
        yield yielded[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


class Fuzzer:
    """Args:
    known: real values of fields, by name, anywhere in path, query and body; "episode_id" also learns from answers.
    token: bearer token of the requests, unless noise replaces it.
    """

    def __init__(self, url: str, known: Mapping[str, list[Any]], token: str) -> None:
        self.url, self.known = url, {name: list(values) for name, values in known.items()}
        self.findings = FuzzFindings()
        self._session = requests.Session()
        self._session.trust_env = False
        self._headers = {"Authorization": f"Bearer {token}"}

    def run(self, n_cases: int, first_seed: int, unreachable: Set[str] = frozenset()) -> FuzzFindings:
        """At least `n_cases` cases; operations that take no input get a quarter of the others' share, those that never
        succeeded and are not `unreachable` some more, after what creates things.
        """
        schema = schemathesis.openapi.from_dict(self._document())
        operations = [found.ok() for found in schema.get_all_operations()]
        weights = [4 if list(operation.iter_parameters()) or operation.body else 1 for operation in operations]
        for number, operation in enumerate(operations):
            share, done = -(-n_cases * weights[number] // sum(weights)), 0
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with suppress(Unsatisfiable):
                    done += self._cases(
                        operation.as_strategy(generation_mode=mode),
                        max(1, share // 3),
                        first_seed + number,
                        noise=False,
                    )
            plain = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
            self._cases(plain, max(1, share - done), first_seed + number, noise=True)
        for round_number in range(1, _ROUNDS + 1):
            self._run_missing(operations, first_seed + round_number * len(operations), unreachable)
        return self.findings

    def _run_missing(self, operations: Sequence[APIOperation], first_seed: int, unreachable: Set[str]) -> None:
        """Send more cases of the operations that never succeeded, after what creates things."""
        missing = self.findings.never_succeeded() - unreachable
        creators = {label for label, status in self.findings.answers if status == 201} if missing else set()
        first = [operation for operation in operations if operation.label in creators]
        again = [one for operation in operations if operation.label in missing for one in (*first, operation)]
        for number, operation in enumerate(again):
            plain = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
            self._cases(plain, _MORE, first_seed + number, noise=False)

    def _document(self) -> dict[str, Any]:
        """Without its security: every request carries a token, and a case that is to have none is a valid one."""
        document = self._session.get(f"{self.url}/openapi.json", timeout=30).json()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation.pop("security", None)
        del document["components"]["securitySchemes"]
        return document

    def _cases(self, strategy: st.SearchStrategy[Case], n: int, seed_: int, *, noise: bool) -> int:
        before = self.findings.cases

        @seed(seed_)
        @settings(
            max_examples=n,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(
            case=strategy, dice=st.randoms(use_true_random=False, note_method_calls=False), number=st.integers(0, 2**32)
        )
        def one(case: Case, dice: random.Random, number: int) -> None:
            self._one(case, random.Random(number + dice.getrandbits(32)), noise)

        one()
        return self.findings.cases - before

    def _one(self, case: Case, dice: random.Random, noise: bool) -> None:
        changed = dice.random() < 0.6
        if changed:
            for place in ("path_parameters", "query", "body"):
                _fill(getattr(case, place, None), self.known, dice)
        request = case.as_transport_kwargs(base_url=self.url)
        request["headers"] = {**self._headers, **request.get("headers", {})}
        if noise:
            _disturb(request, dice)
        answer = self._send(request)
        self.findings.cases += 1
        self.findings.answers[case.operation.label, answer.status_code] += 1
        self._learn(answer)
        try:
            _check(case, answer, schema=not noise, rejects=not noise and not changed)
        except (AssertionError, Failure, FailureGroup) as failure:
            causes = getattr(failure, "exceptions", (failure,))
            for cause in causes:
                kind = f"{case.operation.label} {answer.status_code} {type(cause).__name__}"
                self.findings.failures.setdefault(
                    kind, f"{kind}: {cause} -- {request} -> {answer.content[:500]!r}"[:4000]
                )

    def _send(self, request: dict[str, Any]) -> Response:
        """Once more if the server closed the connection, as it may after a request that was no HTTP."""
        try:
            answer = self._session.request(**request, timeout=30, allow_redirects=False)
        except requests.ConnectionError:
            answer = self._session.request(**request, timeout=30, allow_redirects=False)
        return Response.from_requests(answer, verify=False)

    def _learn(self, answer: Response) -> None:
        if answer.status_code == 201 and "json" in answer.headers["content-type"][0]:
            created = orjson.loads(answer.content)
            if "episode_id" in created:
                self.known["episode_id"] = [*self.known["episode_id"][-7:], created["episode_id"]]


def _fill(value: Any, known: Mapping[str, list[Any]], dice: random.Random) -> None:
    """Puts real values where their names stand."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if known.get(name):
                value[name] = dice.choice(known[name])
            else:
                _fill(inner, known, dice)
    elif isinstance(value, list):
        for inner in value:
            _fill(inner, known, dice)


def _disturb(request: dict[str, Any], dice: random.Random) -> None:
    """One or two things of the request that no schema speaks of."""
    for _ in range(dice.randint(1, 2)):
        kind = dice.randrange(5)
        if kind == 0:
            text = "".join(dice.choices(string.printable[:95], k=dice.randrange(40))).strip()
            request["headers"][dice.choice(_HEADERS)] = dice.choice((*_VALUES, text))
        elif kind == 1:
            request["params"] = {
                "".join(dice.choices(string.ascii_letters, k=3)): dice.choice(_VALUES),
                **(request.get("params") or {}),
            }
        elif kind == 2:
            request.pop("json", None)
            request["data"] = dice.randbytes(dice.choice((0, 1, 30, 3000)))
        elif kind == 3:
            request["method"] = dice.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "QUERY"))
        else:
            request["url"] += dice.choice(("/", "//", "/..", "%00", "%ff%fe", "?x=%", ";a=b", "/" + "a" * 2000))


def _check(case: Case, answer: Response, *, schema: bool, rejects: bool) -> None:
    """No server error, every error a problem; with `schema`, what is declared; with `rejects`, that invalid data is
    refused.
    """
    status = answer.status_code
    assert status < 500 or status in REFUSALS, "server error"
    media = answer.headers.get("content-type", [""])[0]
    if status in REFUSALS:
        assert answer.headers.get("retry-after"), "no Retry-After"
    if status >= 400 and answer.content and not _is_the_parsers(answer):
        assert media == _PROBLEM, f"an error of type {media!r}"
        problem = orjson.loads(answer.content)
        assert problem.keys() >= {"type", "title", "status", "detail"}
        assert problem["status"] == status
        assert len(answer.content) < 10_000, "an error that repeats its input at length"
    if schema and not _is_the_parsers(answer):
        refused = answer.status_code == _TOO_LARGE  # which that check does not count as a refusal
        checks = [negative_data_rejection] if rejects and not refused else []
        case.validate_response(answer, checks=_CHECKS + checks)


def _is_the_parsers(answer: Response) -> bool:
    """What is no HTTP never reaches an application: the server's own parser answers it."""
    return answer.status_code == 400 and answer.content == b"Invalid HTTP request received."
