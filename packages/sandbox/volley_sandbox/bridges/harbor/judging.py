"""Harbor's verifier with a limit on the tests alone, and a record of why it gave no reward.

Harbor counts the upload of the tests and every start of the engine's command, on whatever machine, and gives no valid
reward after its time-out. Here the task's time limits the tests' own run (see `shell`). Tests that have used it up
count as 0; any other end without a reward is noted in the episode, which then has none.
"""

import stat
from pathlib import Path
from typing import Any

from folders import brief
from harbor.environments.base import BaseEnvironment
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import RewardFileEmptyError, RewardFileNotFoundError, Verifier, VerifierOutputParseError
from shell import KILLED, Lost, run
from trials import EPISODE

UNWRITTEN = (RewardFileEmptyError, RewardFileNotFoundError, VerifierOutputParseError)
"""Errors of tests that have run to their end."""
MAX_REWARD_BYTES = 2**20


class LateTests(Exception):
    """The tests have used up their time."""


class Judge(Verifier):
    """Verifier of one trial, or of one of its steps."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        config = self.task.config
        step = next((one for one in config.steps or [] if one.name == self.step_name), None)
        separate = resolve_verifier_environment_definition(config, self.task.paths, step)
        self._skip_tests_upload = separate is not None and separate.bundled_tests  # Harbor gives its own class this
        own_s = step.verifier.timeout_sec if step is not None else None
        self._limit_s = config.verifier.timeout_sec if own_s is None else own_s

    async def verify(self) -> VerifierResult:
        episode = EPISODE.get()
        self.environment = Timed(self.environment, self._limit_s)  # type: ignore[assignment]
        try:
            async with episode.judging:
                return await super().verify()
        except LateTests as error:
            episode.why = str(error)
            return VerifierResult(rewards={})
        except UNWRITTEN as error:
            episode.unjudged = brief(str(error).replace(str(self.trial_paths.trial_dir), "/logs"), type(error).__name__)
            raise
        except Exception as error:
            episode.lost = f"the verifier failed: {brief(error)}"
            raise

    def _parse_reward_text(self) -> dict[str, float | int]:
        check_file(self.trial_paths.reward_text_path)
        return super()._parse_reward_text()

    def _parse_reward_json(self) -> dict[str, float | int]:
        check_file(self.trial_paths.reward_json_path)
        found = super()._parse_reward_json()
        if not isinstance(found, dict):
            raise VerifierOutputParseError(f"{self.trial_paths.reward_json_path} holds no object of numbers")
        return found


def check_file(path: Path) -> None:
    """Raise VerifierOutputParseError unless a reward is written as a file that can be read on this machine."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise VerifierOutputParseError(f"{path} is not a plain file")
    if about.st_size > MAX_REWARD_BYTES:
        raise VerifierOutputParseError(f"{path} has {about.st_size} bytes; at most {MAX_REWARD_BYTES} are read")


class Timed:
    """An environment that limits the one command that the verifier gives variables: the tests."""

    def __init__(self, environment: BaseEnvironment, limit_s: float) -> None:
        self._environment, self._limit_s = environment, limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def exec(self, command: str, **options: Any) -> Any:
        if "env" not in options:
            return await self._environment.exec(command, **options)
        ran = await run(self._environment, command, self._limit_s, **options)
        if ran.late:
            raise LateTests(f"the tests took longer than {self._limit_s:g} s (verifier.timeout_sec)")
        if not ran.ended or ran.code == KILLED:
            raise Lost(f"the tests were killed: {ran.output.strip()[-200:] or ran.code}")
        return ran
