"""Trained tokens a second of our learner and of Tunix's own, and the step of the quickstart's batch: same model, same
episodes, as many positions in a micro-batch, in one process.

Lengths of answers are lognormal, as those of a model that sometimes thinks for long, and cut at the longest. Tunix pads
every episode to the longest prompt and the longest answer; ours are packed into rows, prompts that a group shares once.
Both make whole steps (advantages, micro-batches, loss, gradient, Adam), ours with everything that a step tells and
checks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.learner.policy import Policy
from services.trainer.options import policy_options
from services.trainer.settings import TokenLimits
from shared.models.config import ModelConfig
from shared.schema import RunConfig
from shared.types import Group, Trajectory, VersionSpan, WeightVersion
from tools.bench.result import BenchResult, emit
from tools.bench.trainer import MODEL, make_model
from tools.bench.tunix_learner import Lengths, Recorded, step_seconds

N_STEPS, N_PASSES = 3, 3
_VERSION = WeightVersion(1, 0)
_QUICKSTART = Path(__file__).parents[2] / "configs" / "models" / "quickstart"


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of a step, episodes of each, rows of a micro-batch where every row is as long as `lengths` together, and
    answers with this median and deviation of their logarithm.
    """

    model: ModelConfig
    n_groups: int
    group_size: int
    micro_rows: int
    lengths: Lengths
    median: float
    sigma: float
    buckets: tuple[int, ...]

    def config(self) -> RunConfig:
        """How our learner is configured."""
        return RunConfig.model_validate(
            {
                "model": {"path": "none"},
                "data": {"env": "none"},
                "grpo_config": {"num_generations": self.group_size, "max_response_length": self.lengths.completion},
                "rollout": {"engine": {"context_length": self.buckets[-1]}},
                "trainer": {
                    "groups_per_step": self.n_groups,
                    "micro_batch_tokens": self.micro_rows * (self.lengths.prompt + self.lengths.completion),
                    "length_buckets": self.buckets,
                },
            }
        )

    def steps(self) -> list[list[Recorded]]:
        """`N_STEPS` of them, group by group."""
        rng = np.random.default_rng(0)
        return [list(self._step(rng)) for _ in range(N_STEPS)]

    def _step(self, rng: np.random.Generator) -> Iterator[Recorded]:
        for _ in range(self.n_groups):
            prompt = self._ids(rng, int(rng.integers(self.lengths.prompt // 2, self.lengths.prompt + 1)))
            for _ in range(self.group_size):
                length = int(
                    np.clip(self.median * np.exp(self.sigma * rng.standard_normal()), 1, self.lengths.completion)
                )
                yield Recorded(prompt, self._ids(rng, length), float(rng.integers(0, 2)))

    def _ids(self, rng: np.random.Generator, length: int) -> np.ndarray:
        return rng.integers(2, self.model.vocab_size, length).astype(np.int32)


LOGNORMAL = Workload(MODEL, 4, 4, 4, Lengths(64, 448), 64.0, 1.0, (64, 128, 256, 512))
BOARDS = Workload(ModelConfig.read(_QUICKSTART), 16, 8, 128, Lengths(20, 20), 14.0, 0.1, (40,))


def main() -> None:
    long, short = (_compared(workload) for workload in (LOGNORMAL, BOARDS))
    n_tokens = sum(len(one.completion) for step in LOGNORMAL.steps() for one in step)
    emit(
        {
            "learner_tokens": BenchResult(n_tokens / long[0], "tokens/s", n_tokens / long[1]),
            "learner_quickstart_step": BenchResult(1e3 * short[0] / N_STEPS, "ms", 1e3 * short[1] / N_STEPS),
        }
    )


def _compared(workload: Workload) -> tuple[float, float]:
    """Seconds of all steps, ours and Tunix's: of each the fastest of its passes but the first, which compiles. The two
    alternate.
    """
    steps, ours = workload.steps() * N_PASSES, list[float]()
    options = policy_options(workload.config(), TokenLimits(workload.model.vocab_size, 0))
    policy = Policy(make_model(workload.model), options, workload.model.to_hf(), None)
    held = [held_groups(step, workload.group_size) for step in steps]

    def step_of_ours(n: int) -> None:
        began = time.perf_counter()
        policy.step(held[n], _VERSION)
        ours.append(time.perf_counter() - began)

    theirs = step_seconds(
        make_model(workload.model),
        steps,
        group_size=workload.group_size,
        micro_rows=workload.micro_rows,
        lengths=workload.lengths,
        between=step_of_ours,
    )
    return _fastest(ours), _fastest(theirs)


def _fastest(seconds: Sequence[float]) -> float:
    return sum(min(seconds[i::N_STEPS][1:]) for i in range(N_STEPS))


def held_groups(step: Sequence[Recorded], group_size: int) -> list[ReadyGroup]:
    parts = [step[i : i + group_size] for i in range(0, len(step), group_size)]
    groups = [
        Group(n, "bench", f"bench/{n}", tuple(_trajectory(n, i, one) for i, one in enumerate(part)))
        for n, part in enumerate(parts, start=1)
    ]
    return [ready_group(group, b"", "") for group in groups]


def _trajectory(ticket: int, sample_index: int, one: Recorded) -> Trajectory:
    ids, start = np.concatenate([one.prompt, one.completion]), len(one.prompt)
    mask = (np.arange(len(ids)) >= start).astype(np.uint8)
    told: dict[str, Any] = {"reward": one.reward, "success": one.reward > 0, "status": "completed"}
    return Trajectory(
        ticket=ticket,
        sample_index=sample_index,
        attempt=0,
        env="bench",
        task=f"bench/{ticket}",
        prompt_len=start,
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -7.6, 0.0).astype(np.float32),
        versions=(VersionSpan(str(_VERSION), start, len(ids)),),
        turns=(),
        **told,
    )


if __name__ == "__main__":
    main()
