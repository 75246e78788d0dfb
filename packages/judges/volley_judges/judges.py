"""Add the rewards of all judges of an environment to a complete group.

Invariants
- A group has the rewards of all its judges, or it fails: a missing or unusable answer is never a number.
- The rewards, and digests of what was asked and answered, are part of the group. Training it again, or proving it,
  asks no judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.orchestrator.judges import JudgeContext
from shared.errors import RewardRefused, VolleyError, first_error
from shared.judgements import Judgement
from shared.process import tracing
from shared.types import ASSISTANT, Group, Trajectory, Turn
from volley_judges import rubric
from volley_judges.asking import Asking
from volley_judges.comparing import Comparison
from volley_judges.episode_text import texts_of
from volley_judges.section import ComparisonJudge, GroupJudge, JudgesSection
from volley_sandbox.rewards.servers import AskedServer
from volley_sandbox.rewards.store import RewardStore


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """Rewards of one judge for one episode: components, which sum up to the whole, and the parts of turns, if any."""

    components: Mapping[str, float]
    turns: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.components.values())


class RunJudges:
    """All judges of a run.

    Args:
        servers: by name.
        attempts: most times that one question is asked.
    """

    def __init__(
        self,
        section: JudgesSection,
        context: JudgeContext,
        servers: Mapping[str, AskedServer],
        store: RewardStore,
        attempts: int,
    ) -> None:
        self._section, self._context, self._servers, self._store = section, context, servers, store
        self._attempts = attempts

    async def judge(self, group: Group) -> Group:
        """Return the group with all rewards. Raises VolleyError: the first failure."""
        judges = self._section.of(group.env)
        if not judges:
            return group
        failure: VolleyError | None = None
        try:
            with self._context.status.waits_on("judge"):
                async with asyncio.TaskGroup() as tasks:
                    asked = [
                        tasks.create_task(self._asked(group, name, judges[name]))
                        for name in sorted(judges)  # a sum of rewards does not depend on the order of a file
                    ]
        except* VolleyError as errors:
            failure = first_error(errors)
        else:
            self._context.status.moved()
            made = [task.result() for task in asked]
            return _rewarded(group, [rewards for _, rewards in made], tuple(one for one, _ in made))
        self._context.status.episode_failed(group.env, failure)
        failure.add_note(f"from a judge of {group.env}")
        raise failure

    async def _asked(self, group: Group, name: str, judge: GroupJudge) -> tuple[Judgement, list[EpisodeRewards]]:
        with tracing.span("judge", {"volley.reward": name, "volley.env": group.env}, kind="client"):
            asking = Asking(name, judge, self._servers[judge.server], self._store, self._attempts)
            rewards = await self._rewards(group, name, judge, asking)
            questions, answers = asking.digests()
            turns = tuple(one.turns for one in rewards)
            scores = tuple(one.total for one in rewards)
            record = Judgement(name, asking.model(), questions, answers, scores, turns if any(turns) else ())
            return record, rewards

    async def _rewards(self, group: Group, name: str, judge: GroupJudge, asking: Asking) -> list[EpisodeRewards]:
        texts = await asyncio.to_thread(texts_of, group, self._context.tokenizer, judge.shows)
        if isinstance(judge, ComparisonJudge):
            own = [one.reward for one in group.trajectories]
            scores = await Comparison(judge, texts, own, asking).scores()
            return [EpisodeRewards({name: judge.weight * score}) for score in scores]
        made = list[EpisodeRewards]()
        for rows in await rubric.marks(judge, texts, asking):
            components = {f"{name}/{key}": judge.weight * sum(row[key] for row in rows) for key in judge.criteria}
            of_turns = tuple(judge.weight * sum(row.values()) for row in rows) if judge.per == "turn" else ()
            made.append(EpisodeRewards(components, of_turns))
        return made


def _rewarded(group: Group, rewards: Sequence[Sequence[EpisodeRewards]], judgements: tuple[Judgement, ...]) -> Group:
    """Add the rewards of each judge. Raises RewardRefused if the environment has a component of that name."""
    made = list[Trajectory]()
    for n, trajectory in enumerate(group.trajectories):
        for judgement in judgements:
            if taken := judgement.components(trajectory):
                raise RewardRefused(
                    f"{group.env} has a reward component {min(taken)} of its own", "give the judge another name"
                )
        for of_judge in rewards:
            trajectory = _with_rewards(trajectory, of_judge[n])
        made.append(trajectory)
    judged = replace(group, trajectories=tuple(made), judgements=judgements)
    judged.validate()
    return judged


def _with_rewards(trajectory: Trajectory, rewards: EpisodeRewards) -> Trajectory:
    of_turns = iter(rewards.turns)
    return replace(
        trajectory,
        reward=trajectory.reward + rewards.total,
        reward_components={**trajectory.reward_components, **rewards.components},
        turns=tuple(_added(trajectory.turns, of_turns)),
        branches=tuple(replace(one, turns=tuple(_added(one.turns, of_turns))) for one in trajectory.branches),
    )


def _added(turns: Sequence[Turn], rewards: Iterator[float]) -> Iterator[Turn]:
    for turn in turns:
        yield replace(turn, reward=turn.reward + next(rewards, 0.0)) if turn.role == ASSISTANT else turn
