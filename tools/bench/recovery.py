"""Recovery time of a trainer by steps since the newest checkpoint. Uses the quickstart's model.

The trainer restores the checkpoint, then trains the steps since again, checking each against its checksum. The
reference is the first training of these steps with everything compiled, which a replay cannot beat.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.trainer import options as from_run
from services.trainer.backend.policy import PolicyBackend
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.loop.recovery import LoggedSteps
from services.trainer.settings import TokenLimits
from shared.errors import VolleyError
from shared.models.config import ModelConfig
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.run.progress import TicketProgress
from shared.run.state import TrainerState, initial_state
from shared.schema import RunConfig
from shared.types import Group, Trajectory, VersionSpan, WeightVersion
from tools.bench.result import BenchResult, emit

_MODEL = Path(__file__).parents[2] / "configs" / "models" / "quickstart"
DISTANCES = (0, 1, 5, 20)
_N_GROUPS, _GROUP_SIZE, _PROMPT, _ANSWER = 16, 8, 20, 20
_N_STEPS = 3
"""Number of different steps; the log repeats them."""
_CONFIG = {
    "model": {"path": str(_MODEL), "initial_weights": "random"},
    "data": {"env": "none"},
    "grpo_config": {"num_generations": _GROUP_SIZE, "max_response_length": _ANSWER},
    "rollout": {"engine": {"context_length": _PROMPT + _ANSWER}},
    "trainer": {
        "groups_per_step": _N_GROUPS,
        "micro_batch_tokens": _N_GROUPS * _GROUP_SIZE * (_PROMPT + _ANSWER),
        "length_buckets": [_PROMPT + _ANSWER],
    },
}


class LoggedRun:
    """A run's folder with a checkpoint of step 0, and a log of the steps after it."""

    def __init__(self, folder: Path) -> None:
        self._folder, described = folder, ModelConfig.read(_MODEL)
        config = RunConfig.model_validate(_CONFIG)
        self._parts = (
            from_run.model_options(config, _MODEL),
            described,
            from_run.policy_options(config, TokenLimits(described.vocab_size, 0)),
        )
        self.archive, self.log = Archive(folder / "archive", "bench"), CommitLog(folder / "archive", "bench")
        self.states: list[TrainerState] = []

    def backend(self) -> PolicyBackend:
        """Backend as in a process that has just started, except that JAX is loaded."""
        return PolicyBackend(*self._parts, CheckpointFolders(self._folder / "checkpoints", "bench", 3, OrbaxArrays()))

    def make(self, steps: Sequence[Sequence[ReadyGroup]]) -> float:
        """Make and log the steps. Returns the seconds of the fastest."""
        backend, state = self.backend(), initial_state(0).starting_epoch(1, keep_reference=False)
        self.archive.claim(1)
        self.log.fence(1)
        CheckpointFolders(self._folder / "checkpoints", "bench", 3, OrbaxArrays()).fence(1)
        backend.restore()
        backend.build()
        backend.start(state)
        self.states, seconds = [state], list[float]()
        for n, held in enumerate(steps, start=1):
            started = time.perf_counter()
            backend.step(held, WeightVersion(1, n - 1))
            checksum = backend.checksum()
            seconds.append(time.perf_counter() - started)
            self.archive.write(WeightVersion(1, n), [one.payload for one in held])
            state = state.at(n, TicketProgress(), issued=0, done=False, chain=state.chain)
            self.log.append(state, checksum)
            self.states.append(state)
        return min(seconds)

    def recover(self, distance: int) -> float:
        """Seconds until this step is reached. Raises VolleyError if a step is not reproduced."""
        started, backend = time.perf_counter(), self.backend()
        backend.restore()
        backend.build()
        log = LoggedSteps(self.archive, self.log, self.states[distance])
        for step in range(1, distance + 1):
            if (broken := log.train(backend, step)) is not None:
                raise VolleyError(f"{broken.version}: {broken.why}")
        return time.perf_counter() - started


def main() -> None:
    rng, n_tokens = np.random.default_rng(0), ModelConfig.read(_MODEL).vocab_size
    groups = [[_group(rng, n_tokens, n) for n in range(1, _N_GROUPS + 1)] for _ in range(_N_STEPS)]
    steps = [groups[n % _N_STEPS] for n in range(max(DISTANCES))]
    with tempfile.TemporaryDirectory() as temporary:
        run = LoggedRun(Path(temporary) / "bench")
        step_s = run.make(steps)
        found = {n: run.recover(n) for n in DISTANCES}
    emit({f"recovery_{n}_steps": BenchResult(found[n], "s", n * step_s or None) for n in DISTANCES})


def _group(rng: np.random.Generator, n_tokens: int, ticket: int) -> ReadyGroup:
    """Group of episodes of one turn that share a prompt."""
    prompt = rng.integers(2, n_tokens, rng.integers(_PROMPT // 2, _PROMPT + 1))
    episodes = tuple(_episode(rng, n_tokens, prompt, ticket, index) for index in range(_GROUP_SIZE))
    group = Group(ticket, "bench", f"bench/{ticket}", episodes)
    return ready_group(group, group.encode(), "")


def _episode(rng: np.random.Generator, n_tokens: int, prompt: np.ndarray, ticket: int, index: int) -> Trajectory:
    answer = rng.integers(2, n_tokens, rng.integers(10, _ANSWER + 1))
    ids, reward = np.concatenate([prompt, answer]).astype(np.int32), float(rng.integers(0, 2))
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    return Trajectory(
        ticket=ticket,
        sample_index=index,
        attempt=0,
        env="bench",
        task=f"bench/{ticket}",
        prompt_len=len(prompt),
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -7.6, 0.0).astype(np.float32),
        versions=(VersionSpan(str(WeightVersion(1, 0)), len(prompt), len(ids)),),
        turns=(),
        reward=reward,
        success=reward > 0,
        status="completed",
    )


if __name__ == "__main__":
    main()
