"""Token-in-token-out: the growing record of one episode.

Invariants
- Only appends: the model's ids are kept as sampled; the environment's new text is tokenized once and appended.
- Exact prefix: the prompt of a turn starts with exactly the prompt of the turn before and the ids sampled after it.
  `prompt` checks this every turn against the copy it returned.
- Left truncation starts another sequence: the prompt, then the ids of the kept turns, copied and masked as not sampled.
- If the chat template renders earlier messages differently than before, another sequence starts too. It shares the
  common prefix with the one before; the rest of its prompt is not sampled.
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
        # The present sequence; `_last_prompt` is what `prompt` last returned.
        self._ids = self._last_prompt = np.asarray(prompt_ids, np.int32)
        self._mask = np.zeros(len(prompt_ids), np.uint8)
        self._logprobs = np.zeros(len(prompt_ids), np.float32)
        self._spans: list[VersionSpan] = []
        self._routed: list[np.ndarray] = []
        self._n_routed = n_routed
        self._turns = [Turn(0, len(prompt_ids), PROMPT)]
        self._turn_starts: list[int] = []  # of the assistant's turns
        self._parent, self._shared = 0, 0
        self._n_prompt, self._prompt_of = len(prompt_ids), 0  # its prompt's length, and the sequence that stores it
        # The sequences before it, and what belongs to the whole episode.
        self._ended: list[Branch] = []
        self._ended_n_routed: list[int] = []
        self._prompt_len = len(prompt_ids)
        self._components: dict[str, float] = {}
        self._faults: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ids)

    def prompt(self) -> np.ndarray:
        """Return int32 [T], read-only: all ids so far, for the model to continue. Raises PrefixBroken."""
        if not np.array_equal(self._ids[: len(self._last_prompt)], self._last_prompt):
            raise PrefixBroken(f"the first {len(self._last_prompt)} ids changed between two turns")
        self._last_prompt = self._ids.copy()
        self._last_prompt.flags.writeable = False
        return self._last_prompt

    @property
    def n_routed(self) -> int:
        """Number of positions, from the first on, with known experts."""
        return self._n_routed + sum(map(len, self._routed))

    def add_sampled(self, generation: Generation) -> None:
        """Append ids that the model sampled, a turn or a part of it; their experts start at position `n_routed`."""
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
        self._turn_starts.append(start)
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
        return [len(self) - (start - self._n_prompt) for start in [self._n_prompt, *self._turn_starts[1:]]]

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns so far."""
        return float(sum(turn.reward for turns in (*(one.turns for one in self._ended), self._turns) for turn in turns))

    @property
    def n_tree_tokens(self) -> int:
        """Number of tokens of all sequences, each counted whole."""
        return len(self) + sum(one.shared + len(one.token_ids) for one in self._ended)

    @property
    def n_branches(self) -> int:
        return len(self._ended)

    def drop_oldest(self, n: int) -> None:
        """Continue in another sequence: the prompt, and everything from assistant turn `n` on, counted from 0.

        Call it after an assistant turn; it keeps at least that turn.
        """
        head, start = self._n_prompt, self._turn_starts[n]
        self._start_sequence(np.concatenate([self._ids[:head], self._ids[start:]]), self._prompt_of, head)
        self._turn_starts = [at - start + head for at in self._turn_starts[n:]]

    def start_over(self, prompt_ids: Sequence[int]) -> None:
        """Continue in another sequence. Args: prompt_ids: the whole conversation so far, rendered again."""
        ids = np.asarray(prompt_ids, np.int32)
        n = min(len(ids) - 1, len(self))
        differ = np.flatnonzero(ids[:n] != self._ids[:n])
        self._n_prompt, self._prompt_of = len(ids), len(self._ended) + 1
        self._start_sequence(ids, len(self._ended), int(differ[0]) if len(differ) else n)
        self._turn_starts = []

    def _start_sequence(self, ids: np.ndarray, parent: int, shared: int) -> None:
        """Start another sequence with these ids, of which the first `shared` are those of sequence `parent`."""
        self._ended.append(self._present_sequence())
        self._ended_n_routed.append(self.n_routed)
        self._routed, self._n_routed = [], min(shared, self._ended_n_routed[parent])
        self._parent, self._shared = (parent, shared) if shared else (-1, 0)
        self._ids = self._last_prompt = ids
        self._mask, self._logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
        self._spans = []
        self._turns = [Turn(shared, len(ids), HISTORY)]

    def sampled_since(self, start: int) -> Generation:
        """Return the tokens sampled from position `start` on as one generation; versions are positions in it."""
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
        first, *branches = [*self._ended, self._present_sequence()]
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
            reward=self.reward,
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

    def _present_sequence(self) -> Branch:
        """Return the present sequence."""
        return Branch(
            parent=self._parent,
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
