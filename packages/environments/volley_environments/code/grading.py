"""Tests of a program, evaluated out of the program's reach.

Invariants
- The answer runs in its own sandbox, and never sees expected results: of asserts it sees the arguments of calls, of
  other tests the input.
- Asserts run in another sandbox, on plain values (`inside.py`); printed output is compared here. So the answer cannot
  influence the verdict by patching, exiting, printing or pretending, but only by its values.
- Every test program has its own processes, which cannot affect those of others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib import resources
from typing import Any

import orjson

from shared.errors import SandboxFailed, SandboxLost
from volley_environments.code.data import Asserts, CodeProblem, PrintedTest
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.clock import SLOWEST, limited
from volley_sandbox.sandbox.limits import SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes

MAX_OUTPUT = 2**18
"""Characters that a program may print in a test."""

TOTAL_S = 20.0
"""Seconds for all tests of an answer, without the starts of their sandboxes (see volley_sandbox.sandbox.clock)."""
_START_S = 60.0
_WALL_FACTOR, _WALL_MORE_S = 2.0, 2.0
"""Limit of a program that only waits, relative to its CPU time."""
_CALL_S = SLOWEST * TOTAL_S + _START_S
"""Deadline of one call into a sandbox, longer than any limit of the program."""


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """Verdict on one test. `why`: passed, wrong, exception, time, memory, crash or output."""

    passed: bool
    why: str = "passed"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Grader:
    """Runner of tests.

    Args:
        cpu_s, memory_mb: limits of one test program.
    """

    sandboxes: Sandboxes
    cpu_s: int
    memory_mb: int

    async def grade(
        self, problem: CodeProblem, source: str, tests: Sequence[Asserts | PrintedTest], *, all_of_them: bool
    ) -> list[ProgramVerdict]:
        """Grade an answer: one verdict per test, up to the first failure unless `all_of_them`.

        Raises RateLimited, SandboxFailed, SandboxLost, Unavailable.
        """
        found, left_s = list[ProgramVerdict](), TOTAL_S
        for test in tests:
            if found and not found[-1].passed and not all_of_them:
                break
            if left_s <= 0:
                found.append(ProgramVerdict(False, "time", "the tests together took too long"))
                continue
            verdict, took_s = await self._run_test(problem, source, test, left_s)
            found.append(verdict)
            left_s -= took_s
        return found

    async def _run_test(
        self, problem: CodeProblem, source: str, test: Asserts | PrintedTest, left_s: float
    ) -> tuple[ProgramVerdict, float]:
        """Verdict of a test, and its seconds without the start of its sandboxes. Raises SandboxLost, Unavailable."""
        limit_s = min(left_s, _WALL_FACTOR * self.cpu_s + _WALL_MORE_S)
        async with AsyncExitStack() as stack:
            n = 1 if isinstance(test, PrintedTest) else 2
            opened = [await stack.enter_async_context(self._sandbox()) for _ in range(n)]
            try:
                return await limited(self._verdict_of(problem, source, test, opened), limit_s)
            except TimeoutError:
                return ProgramVerdict(False, "time", "the program takes too long"), limit_s

    async def _verdict_of(
        self, problem: CodeProblem, source: str, test: Asserts | PrintedTest, opened: Sequence[Sandbox]
    ) -> ProgramVerdict:
        try:
            if isinstance(test, PrintedTest):
                return await self._printed(source, test, opened[0])
            return await self._asserted(problem, source, test, *opened)
        except SandboxLost:
            raise
        except SandboxFailed as failed:
            return ProgramVerdict(False, _WHY.get(failed.why, "crash"), failed.detail[:300])

    async def _printed(self, source: str, test: PrintedTest, sandbox: Sandbox) -> ProgramVerdict:
        program = f"{_text_of('stdin_side.py')}\nexec(compile({source!r}, 'answer.py', 'exec'), globals())"
        asked = {"source": program, "stdin": test.stdin, "max_output": MAX_OUTPUT}
        found = answers.read_script(await sandbox.call("run", asked, _CALL_S))
        if found.exit:
            return ProgramVerdict(False, "exception", found.stderr[-300:])
        if found.cut:
            return ProgramVerdict(False, "output", f"it printed more than {MAX_OUTPUT} characters")
        return ProgramVerdict(True) if same_output(found.stdout, test.stdout) else ProgramVerdict(False, "wrong")

    async def _asserted(
        self, problem: CodeProblem, source: str, test: Asserts, answering: Sandbox, testing: Sandbox
    ) -> ProgramVerdict:
        answer, tests = _Cells(answering, self.cpu_s), _Cells(testing, self.cpu_s)
        for text in (f"{_text_of('inside.py')}\n_be_answer()", problem.given, source):
            if (problems := await answer.run(text)) is not None:
                return ProgramVerdict(False, "exception", problems[-300:])
        names = _names(await answer.value("__import__('json').dumps([n for n in globals() if n[0] != '_'])"))
        await tests.run(_text_of("inside.py"))
        call = f"_begin({problem.given + chr(10) + problem.setup!r}, {test.program!r}, {names!r}, {problem.tested!r})"
        while True:
            reply_of_tests = _object(await tests.value(call))
            if "ask" not in reply_of_tests:
                return _verdict(reply_of_tests)
            reply = await answer.value(f"_answer({orjson.dumps(reply_of_tests['ask']).decode()!r})")
            if reply is None:
                late = "CpuTimeUsedUp" in answer.complaint
                return ProgramVerdict(False, "time" if late else "crash", answer.complaint[-300:])
            call = f"_go_on({reply!r})"

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        limits = SandboxLimits(cpu_s=self.cpu_s, memory_mb=self.memory_mb, threads=8, disk_mb=16, log_bytes=2**12)
        sandbox = await self.sandboxes.start(ScriptProgram(), limits, _START_S)
        try:
            yield sandbox
        finally:
            await asyncio.shield(sandbox.close())


_WHY = {"cpu": "time", "time": "time", "memory": "memory", "output": "output", "exception": "exception"}


class _Cells:
    """Texts run one after the other in a sandbox."""

    def __init__(self, sandbox: Sandbox, cpu_s: float) -> None:
        self._sandbox, self._cpu_s = sandbox, cpu_s
        self._seed: int | None = 0
        self.complaint = ""
        """Output of the last text on stderr, including an exception."""

    async def run(self, source: str) -> str | None:
        """Run a text; return its error, None if it succeeded."""
        found = await self._cell(source)
        return (found.stderr or f"it ended with exit code {found.exit}") if found.exit else None

    async def value(self, expression: str) -> str | None:
        """Text value of an expression; None if it has none. A random mark separates it from printed output."""
        mark = secrets.token_hex(16)
        found = await self._cell(f"__import__('sys').stdout.write({mark!r} + ({expression}) + '\\n') and None")
        _, marked, text = found.stdout.rpartition(mark)
        return text.partition("\n")[0] if marked else None

    async def _cell(self, source: str) -> answers.ScriptResult:
        asked: dict[str, Any] = {"source": source, "seed": self._seed, "cpu_s": self._cpu_s, "max_output": MAX_OUTPUT}
        self._seed = None
        asked |= {"files": {}, "removed": [], "received": True, "max_bytes": 0}
        found = answers.read_cell(await self._sandbox.call("cell", asked, _CALL_S)).script
        self.complaint = found.stderr
        return found


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs by lines, ignoring trailing blanks, or by words, with numbers compared by value."""
    if [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]:
        return True
    one, other = printed.split(), expected.split()
    return len(one) == len(other) and all(_same_word(a, b) for a, b in zip(one, other, strict=True))


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if max(len(one), len(other)) > 64:
        return False
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:
        return False


def _verdict(reply_of_tests: dict[str, Any]) -> ProgramVerdict:
    if reply_of_tests.get("passed") is True:
        return ProgramVerdict(True)
    return ProgramVerdict(False, str(reply_of_tests.get("why", "time")), str(reply_of_tests.get("detail", "")))


def _object(text: str | None) -> dict[str, Any]:
    """Answer of the tests; empty if they were interrupted."""
    found = orjson.loads(text) if text is not None else {}
    return found if isinstance(found, dict) else {}


def _names(text: str | None) -> list[str]:
    """Names that the answer reports as defined."""
    try:
        found = orjson.loads(text or "[]")
    except orjson.JSONDecodeError:
        return []
    return [name for name in found if isinstance(name, str) and name.isidentifier()][:10_000]


@cache
def _text_of(name: str) -> str:
    return resources.files("volley_environments.code").joinpath(name).read_text(encoding="utf-8")
