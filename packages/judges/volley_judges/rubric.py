"""Marks of the episodes of one group by a rubric: one question for each different episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from shared.errors import RewardRefused
from volley_judges import prompts
from volley_judges.asking import Asking
from volley_judges.episode_text import EpisodeText
from volley_judges.section import RubricJudge


async def marks(judge: RubricJudge, texts: Sequence[EpisodeText], asking: Asking) -> list[list[dict[str, float]]]:
    """Return for each episode the scores by criterion of each of its turns, or of the whole alone.

    A criterion's score is its mark, scaled to 0 to 1, times its share of all criteria's weights; those of turns are
    divided by their number. So the scores of an episode add up to 1 if every mark is the highest.

    Raises as `Asking.ask`, and RewardRefused for an episode without turns.
    """
    if judge.per == "turn" and not all(one.n_turns for one in texts):
        raise RewardRefused("an episode has no recorded turns, so a judge cannot mark them", "use per: episode")
    async with asyncio.TaskGroup() as tasks:
        asked = {one: tasks.create_task(_marked(judge, one, asking)) for one in dict.fromkeys(texts)}
    return [asked[one].result() for one in texts]


async def _marked(judge: RubricJudge, text: EpisodeText, asking: Asking) -> list[dict[str, float]]:
    prompt = prompts.rubric(judge, text.task, text.said, text.n_turns)
    rows = await asking.ask(prompt, partial(prompts.read_marks, judge, n_turns=text.n_turns))
    whole = sum(criterion.weight for criterion in judge.criteria.values())
    share = {name: criterion.weight / whole / len(rows) for name, criterion in judge.criteria.items()}
    return [{name: share[name] * mark for name, mark in row.items()} for row in rows]
