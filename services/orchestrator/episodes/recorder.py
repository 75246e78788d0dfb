"""Token-in-token-out: the growing record of one episode.

Invariants
- Only appends: the model's ids are kept as sampled; the environment's new text is tokenized once and appended.
- Exact prefix: the prompt of a turn starts with exactly the prompt of the turn before and the ids sampled after it.
  `prompt` checks this every turn against the copy it returned.
- Left truncation begins another sequence: the prompt, and then ids of the turns that are kept, copied and not sampled.
- Mask and log-probability are nonzero only on sampled tokens, and version spans cover exactly those.
- The experts of a position, if recorded, are those of the first request that computed it: for a sampled token, those it
  was sampled with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.orchestrator.episodes.failures import PrefixBroken
from shared.clients.rollout import Generation
from shared.outcomes import End, Fault
from shared.sequences import add_span
from shared.types import ASSISTANT, HISTORY, Branch, Status, Trajectory, Turn, VersionSpan

PROMPT = "prompt"


class Recorder:
    """Tokens of one episode so far.

    Args:
        prompt_ids: ids up to and including the first assistant header.
        n_routed: number of positions whose experts are recorded elsewhere.
    """

    def __init__(self, prompt_ids: Sequence[int] | np.ndarray, n_routed: int = 0) -> None:
        self._ids = np.asarray(prompt_ids, np.int32)
        self._mask = np.zeros(len(prompt_ids), np.uint8)
        self._logprobs = np.zeros(len(prompt_ids), np.float32)
        self._prompt_len = len(prompt_ids)
        self._sent = self._ids
        self._spans: list[VersionSpan] = []
        self._routed: list[np.ndarray] = []
        self._n_routed = n_routed
        self._turns = [Turn(0, len(prompt_ids), PROMPT)]
        self._starts: list[int] = []
        self._shared = 0
        self._truncated: list[Branch] = []
        self._components: dict[str, float] = {}
        self._faults: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ids)

    def prompt(self) -> np.ndarray:
        """Return int32 [T], read-only: all ids so far, for the model to continue. Raises PrefixBroken."""
        if not np.array_equal(self._ids[: len(self._sent)], self._sent):
            raise PrefixBroken(f"the first {len(self._sent)} ids changed between two turns")
        self._sent = self._ids.copy()
        self._sent.flags.writeable = False
        return self._sent

    @property
    def n_routed(self) -> int:
        """Number of positions, from the first on, with known experts."""
        return self._n_routed + sum(map(len, self._routed))

    def add_sampled(self, generation: Generation) -> None:
        """Append the model's ids of this turn, or a further part of it; experts are those from `n_routed` on."""
        start = len(self)
        self._append(generation.output_ids, generation.logprobs, sampled=True)
        if generation.routed_experts is not None:
            self._routed.append(generation.routed_experts)
        for span in generation.versions:
            add_span(self._spans, span.moved(start))

    def end_turn(
        self, start: int, reward: float, components: Mapping[str, float], faults: Iterable[Fault | None] = ()
    ) -> None:
        """End the assistant turn that started at position `start`, with the environment's result."""
        self._turns.append(Turn(start, len(self), ASSISTANT, reward))
        self._starts.append(start)
        self._faults.update(fault for fault in faults if fault is not None)
        self._add_components(components)

    def add_reward(self, reward: float, components: Mapping[str, float]) -> None:
        """Add the reward of the episode's end to the last assistant turn."""
        at = max(i for i, turn in enumerate(self._turns) if turn.role == ASSISTANT)
        self._turns[at] = replace(self._turns[at], reward=self._turns[at].reward + reward)
        self._add_components(components)

    def add_environment(self, ids: Sequence[int], role: str) -> None:
        """Append the environment's text and the next assistant header."""
        start = len(self)
        self._append(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), sampled=False)
        self._turns.append(Turn(start, len(self), role))

    def lengths_without_oldest(self) -> list[int]:
        """Length of the present sequence without its 0, 1, … oldest assistant turns; the newest is always kept."""
        return [len(self) - (start - self._prompt_len) for start in [self._prompt_len, *self._starts[1:]]]

    @property
    def n_tree_tokens(self) -> int:
        """Number of tokens of all sequences, each counted whole."""
        return len(self) + sum(one.shared + len(one.token_ids) for one in self._truncated)

    @property
    def n_truncations(self) -> int:
        return len(self._truncated)

    def drop_oldest(self, n: int) -> None:
        """Continue in another sequence: the prompt, and everything from assistant turn `n` on, counted from 0.

        It follows an assistant turn, and leaves at least that one.
        """
        self._truncated.append(self._sequence())
        n_prompt, start = self._prompt_len, self._starts[n]
        self._ids = np.concatenate([self._ids[:n_prompt], self._ids[start:]])
        self._mask, self._logprobs = np.zeros(len(self), np.uint8), np.zeros(len(self), np.float32)
        self._sent, self._spans, self._shared = self._ids, [], n_prompt
        first = self._truncated[0].routed_experts
        self._routed, self._n_routed = [], 0 if first is None else min(n_prompt, len(first))
        self._turns = [Turn(n_prompt, len(self), HISTORY)]
        self._starts = [at - start + n_prompt for at in self._starts[n:]]

    def sampled_since(self, start: int) -> Generation:
        """Return what was sampled from position `start` on, as one generation; versions are positions in it."""
        spans = tuple(span.moved(-start) for span in self._spans if span.start >= start)
        routed = np.concatenate(self._routed) if self._routed else None
        return Generation(self._ids[start:], self._logprobs[start:], spans, "stop", routed_experts=routed)

    def ids_since(self, start: int) -> list[int]:
        return self._ids[start:].tolist()

    def trajectory(
        self,
        *,
        ticket: int,
        sample_index: int,
        attempt: int,
        env: str,
        task: str,
        success: bool,
        status: Status,
        end: End,
        failures: Mapping[str, int],
        timings: Mapping[str, float],
    ) -> Trajectory:
        """Return the finished record; the reward is the sum over the turns."""
        first, *branches = [*self._truncated, self._sequence()]
        return Trajectory(
            ticket=ticket,
            sample_index=sample_index,
            attempt=attempt,
            env=env,
            task=task,
            prompt_len=self._prompt_len,
            token_ids=first.token_ids,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            versions=first.versions,
            turns=first.turns,
            reward=float(sum(turn.reward for one in (first, *branches) for turn in one.turns)),
            success=success,
            status=status,
            reward_components=self._components,
            timings=timings,
            end=end,
            faults=dict(self._faults),
            failures=dict(failures),
            routed_experts=first.routed_experts,
            branches=tuple(branches),
        )

    def _sequence(self) -> Branch:
        """Return the present sequence; its parent is the first one."""
        return Branch(
            parent=0,
            shared=self._shared,
            token_ids=self._ids[self._shared :],
            loss_mask=self._mask[self._shared :],
            logprobs=self._logprobs[self._shared :],
            versions=tuple(self._spans),
            turns=tuple(self._turns),
            routed_experts=np.concatenate(self._routed) if self._routed else None,
        )

    def _add_components(self, components: Mapping[str, float]) -> None:
        for name, value in components.items():
            self._components[name] = self._components.get(name, 0.0) + value

    def _append(self, ids: np.ndarray, logprobs: np.ndarray, *, sampled: bool) -> None:
        self._ids = np.concatenate([self._ids, ids])
        self._mask = np.concatenate([self._mask, np.full(len(ids), sampled, np.uint8)])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
