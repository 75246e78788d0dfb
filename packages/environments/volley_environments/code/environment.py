"""Programming problems: the answer's last Python block runs against the problem's tests in sandboxes (`grading.py`).

The reward is for all tests passing, or with `partial` for the share that passes. One answer an episode.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.env.episode_types import MAX_REWARD, Demonstration, Info, Message, StepResult, assistant, user
from shared.errors import Busy, NotFound, RateLimited
from volley_environments.code.data import Asserts, CodeProblem, PrintedTest, read_code
from volley_environments.code.grading import Grader, ProgramVerdict
from volley_environments.problem_files import ProblemFiles, files_of_splits
from volley_sandbox.sandbox.repeated_call import RepeatedCall
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.toolset import Toolbox

_FENCED = re.compile(r"```[ \t]*+(\w*+)[ \t]*+\n(.*?)```", re.DOTALL)
_LANGUAGES = ("", "python", "python3", "py")
_ASK = "Answer with the whole program in one block:\n```python\n…\n```"
_READS = "The program reads its input from stdin and prints to stdout."
_MAX_PROGRAM = 100_000


class CodeConfig(BaseModel):
    """Settings of the programming problems.

    `train` and `eval` are JSONL files. An answer that passes all tests is worth `correct_reward`; with `partial`, the
    share of passed tests counts. The first `show_tests` of a problem's visible tests are shown. At most `max_tests` are
    run, each with `cpu_s` seconds of CPU time and `memory_mb` MiB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    train: Path | None = None
    eval: Path | None = None
    partial: bool = False
    correct_reward: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    show_tests: int = Field(default=1, ge=0, le=100)
    max_tests: int = Field(default=32, ge=1, le=1000)
    cpu_s: int = Field(default=4, ge=1, le=10)
    memory_mb: int = Field(default=512, ge=128, le=16_384)


@dataclass(slots=True)
class CodeEpisode:
    """One problem with one answer. Its step is a coroutine, because it waits for programs.

    After Busy, the step's repetition waits for the same `grading` of its `program`.
    """

    env: Code
    problem: CodeProblem
    tools: Sequence[Mapping[str, Any]] = ()
    program: str | None = None
    grading: RepeatedCall[list[ProgramVerdict]] = field(default_factory=RepeatedCall[list[ProgramVerdict]])

    @property
    def opening(self) -> tuple[Message, ...]:
        return (self.env.question(self.problem),)

    async def step(self, message: Message) -> StepResult:
        """Grade one answer. Raises Busy, Forbidden (programs cannot be confined here), Unavailable, SandboxLost."""
        program = read_program(message["content"])
        if program is None:
            return StepResult((), 0.0, True, False, Info({"tests": 0.0}, False, "format"))
        if self.program != program:
            self.program, self.grading = program, RepeatedCall()
        tests = self.env.tests_of(self.problem)
        grade = await self.env.grader_of(self.problem, program, tests)
        try:
            verdicts = await self.grading.answer(grade)
        except Busy:
            raise
        except RateLimited as full:
            raise Busy(full.detail, full.hint, full.retry_after_s) from full
        n_tests, n_passed = len(tests), sum(verdict.passed for verdict in verdicts)
        success = n_passed == n_tests
        share = n_passed / n_tests if self.env.config.partial else float(success)
        failed = next((verdict for verdict in verdicts if not verdict.passed), ProgramVerdict(True))
        extra = {"verdict": failed.why, "detail": failed.detail, "n_passed": n_passed, "n_tests": n_tests}
        rewards = {"tests": self.env.config.correct_reward * share}
        return StepResult((), rewards["tests"], True, False, Info(rewards, success, None, extra))


class Code(ProblemFiles[CodeProblem]):
    """Environment of programming problems.

    Files are read at the first use of a split; raises ConfigError if one is missing or malformed.

    Args:
        toolbox: sandboxes for the programs.
    """

    def __init__(self, config: CodeConfig, toolbox: Toolbox) -> None:
        hint = "set data.train and data.eval to JSONL files of programming problems"
        files = files_of_splits(config.train, config.eval)
        super().__init__("code", files, read_code, lambda problem: problem.question, hint)
        self.config, self._toolbox = config, toolbox
        self._places = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    def reset(self, split: str, index: int, seed: int) -> CodeEpisode:
        """Start an episode. `seed` has no effect, because nothing is random."""
        return CodeEpisode(self, self.problem(split, index))

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The data set's solution. Raises NotFound if there is none."""
        problem = self.problem(split, index)
        if problem.solution is None:
            raise NotFound(f"code/{split}/{index} has no solution of its own")
        answer = assistant(f"```python\n{problem.solution.strip()}\n```")
        return Demonstration((self.question(problem), answer), success=True)

    def question(self, problem: CodeProblem) -> Message:
        reads = any(isinstance(test, PrintedTest) for test in problem.tests)
        shown = problem.shown[: self.config.show_tests]
        parts = [problem.question, *([_READS] if reads else [])]
        parts += ["For example:\n" + "\n".join(shown)] if shown else []
        return user("\n".join([*parts, _ASK]))

    def tests_of(self, problem: CodeProblem) -> Sequence[Asserts | PrintedTest]:
        tests = problem.tests[: self.config.max_tests]
        return tests if self.config.partial else _merge_asserts(tests)

    async def grader_of(
        self, problem: CodeProblem, program: str, tests: Sequence[Asserts | PrintedTest]
    ) -> Callable[[], asyncio.Future[list[ProgramVerdict]]]:
        """Function that begins the grading of an answer. Raises Forbidden, Unavailable."""
        await self._toolbox.check_confined("the environment code", "code")
        grader = Grader(self._sandboxes, self.config.cpu_s, self.config.memory_mb)

        async def graded() -> list[ProgramVerdict]:
            async with self._places:
                return await grader.grade(problem, program, tests, all_of_them=self.config.partial)

        return lambda: self._sandboxes.calls.begin(graded())

    @property
    def _sandboxes(self) -> Sandboxes:
        return self._toolbox.sandboxes


def read_program(text: str) -> str | None:
    """Last fenced block of an answer that is Python or has no language; None if there is none."""
    blocks = [body for language, body in _FENCED.findall(text) if language.lower() in _LANGUAGES]
    return blocks[-1][:_MAX_PROGRAM] if blocks else None


def _merge_asserts(tests: tuple[Asserts | PrintedTest, ...]) -> tuple[Asserts | PrintedTest, ...]:
    """Merge all asserts into one program, for when only all of them together count."""
    asserts = [test.program for test in tests if isinstance(test, Asserts)]
    others = tuple(test for test in tests if isinstance(test, PrintedTest))
    return (*others, Asserts("\n".join(asserts))) if asserts else others
