"""Comparison of the answers of one group: questions of one judge, and the scores that follow.

Equal answers are one: they are asked about once, and tie. Different ones are put in the order of their digests, so
neither the number of an episode nor chance decides what a judge reads first.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from volley_judges import prompts
from volley_judges.asking import Asking
from volley_judges.episode_text import EpisodeText
from volley_judges.section import ComparisonJudge
from volley_judges.standings import LOSS, TIE, WIN, agreed, bracket, n_rounds, win_rates, wins_of_ranking

_RESULT = (TIE, WIN, LOSS)
"""Result of the first of two answers, by the number of the better one."""


class Comparison:
    """One judge and one group.

    Args:
        rewards: of the episodes before this judge; they seed a tournament.
    """

    def __init__(
        self, judge: ComparisonJudge, texts: Sequence[EpisodeText], rewards: Sequence[float], asking: Asking
    ) -> None:
        self._judge, self._asking = judge, asking
        self._task = texts[0].task
        self._answers = sorted({one.said for one in texts}, key=lambda said: hashlib.blake2b(said.encode()).digest())
        self._kinds = [self._answers.index(one.said) for one in texts]
        of_kind = [[r for r, kind in zip(rewards, self._kinds, strict=True) if kind == k] for k in range(self._n)]
        self._rewards = [sum(found) / len(found) for found in of_kind]

    @property
    def _n(self) -> int:
        return len(self._answers)

    async def scores(self) -> list[float]:
        """Return a score from 0 to 1 for each episode. Raises as `Asking.ask`."""
        if self._n == 1:
            return [TIE] * len(self._kinds)
        match self._judge.type:
            case "ranking":
                return win_rates(await self._ranked(), self._kinds)
            case "pairwise":
                return win_rates(await self._paired(), self._kinds)
            case "tournament":
                survived = await self._tournament()
                return [survived[kind] for kind in self._kinds]

    async def _ranked(self) -> np.ndarray:
        prompt = prompts.ranking(self._task, self._answers, self._judge.criterion)
        return wins_of_ranking(await self._asking.ask(prompt, partial(prompts.read_ranking, n=self._n)))

    async def _paired(self) -> np.ndarray:
        pairs = [(one, other) for one in range(self._n) for other in range(one)]
        wins = np.full((self._n, self._n), TIE)
        for (one, other), result in zip(pairs, await self._met(pairs), strict=True):
            wins[one, other], wins[other, one] = result, WIN - result
        return wins

    async def _tournament(self) -> list[float]:
        """Return the share of rounds that each answer survived; a better seed survives a tie."""
        seeds = sorted(range(self._n), key=lambda kind: (-self._rewards[kind], kind))
        seed_of = {kind: seed for seed, kind in enumerate(seeds)}
        left: list[int | None] = [seeds[seed] if seed < self._n else None for seed in bracket(self._n)]
        survived, last = [WIN] * self._n, n_rounds(self._n)
        for number in range(last):
            fixtures = [*zip(left[::2], left[1::2], strict=True)]
            matches = [(one, other) for one, other in fixtures if one is not None and other is not None]
            results = dict(zip(matches, await self._met(matches), strict=True))
            left = []
            for one, other in fixtures:
                if one is None or other is None:
                    left.append(other if one is None else one)
                    continue
                result = results[one, other]
                is_first = seed_of[one] < seed_of[other] if result == TIE else result == WIN
                winner, loser = (one, other) if is_first else (other, one)
                survived[loser] = number / last
                left.append(winner)
        return survived

    async def _met(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return the result of the first of each two answers, asked in both orders at once."""
        async with asyncio.TaskGroup() as tasks:
            first = [tasks.create_task(self._result(one, other)) for one, other in pairs]
            second = [tasks.create_task(self._result(other, one)) for one, other in pairs]
        return [agreed(a.result(), WIN - b.result()) for a, b in zip(first, second, strict=True)]

    async def _result(self, one: int, other: int) -> float:
        prompt = prompts.pair(self._task, self._answers[one], self._answers[other], self._judge.criterion)
        return _RESULT[await self._asking.ask(prompt, prompts.read_better)]
