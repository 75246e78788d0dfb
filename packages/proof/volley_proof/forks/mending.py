"""Compute new rewards for a fork: replay the log's episodes in its environments, and store the groups.

The groups are stored in the fork's folder `mended/`, as an archive of the other run. A group with an episode that
cannot be replayed is not trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shared import config
from shared.clients.env import EnvClient
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.models.hub import model_folder
from shared.run import archive
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.run.lineage import epoch_of
from shared.types import ASSISTANT, Group, Trajectory, Turn, WeightVersion
from volley_proof.forks.plan import ForkPlan
from volley_proof.reverify.episodes import ReplayedRewards, replay_rewards, with_judgements

_AT_ONCE = 32


def is_complete(plan: ForkPlan) -> bool:
    """True if every step of the log that the fork trains has its groups in `mended/`."""
    return all(archive.path_of(plan.folder.mended, version).exists() for version in versions(plan))


async def mend(plan: ForkPlan, environments: EnvClient, say: Callable[[str], None]) -> None:
    """Write the missing groups. Raises VolleyError."""
    run = config.stored(plan.folder.path).config
    model = await asyncio.to_thread(model_folder, run.model.path, plan.folder.path)
    tokenizer = await asyncio.to_thread(ChatTokenizer, model)
    source, made = RunFolder(Path(plan.fork.source)).archive, Archive(plan.folder.mended, plan.fork.run)
    judges = plan.fork.judged_by
    slots, counts, whys = asyncio.Semaphore(_AT_ONCE), Counter[str](), Counter[str]()

    async def one(group: Group, n: int) -> ReplayedRewards:
        env = judges.get(group.env, group.env)
        async with slots:
            found = await replay_rewards(environments, tokenizer, group.trajectories[n], run.run.seed, env)
        return with_judgements(found, group, n)

    for version in versions(plan):
        path = archive.path_of(plan.folder.mended, version)
        if path.exists():
            continue
        groups = [Group.decode(payload) for payload in archive.read(source, plan.fork.run, version)]
        renewed = list[Group]()
        for group in groups:
            found = await asyncio.gather(*(one(group, n) for n in range(len(group.trajectories))))
            counts["episodes"] += len(found)
            counts["changed"] += sum(row.changed for row in found)
            whys.update(row.why for row in found if row.reward is None)
            renewed.append(mended(group, found))
        if all(group.failure is not None for group in renewed):
            raise ConfigError(
                f"no episode of {version} can be replayed: {whys.most_common(1)[0][0]}",
                "the fork's settings may change rewards, but not the tasks",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(made.write, version, [group.encode() for group in renewed])
    say(f"rewards: {counts['changed']} of {counts['episodes']} episodes have another one now")
    for why, n in whys.most_common(5):
        say(f"  not replayed, so their groups are not trained: {n}: {why}")


def mended(group: Group, found: Sequence[ReplayedRewards]) -> Group:
    """Return the group with the new rewards; a failed one if an episode could not be replayed."""
    if (why := next((row.why for row in found if row.reward is None), None)) is not None:
        return replace(group, trajectories=(), failure=f"an episode could not be replayed: {why}", judgements=())
    pairs = zip(group.trajectories, found, strict=True)
    return replace(group, trajectories=tuple(_rewarded(one, row) for one, row in pairs))


def _rewarded(trajectory: Trajectory, found: ReplayedRewards) -> Trajectory:
    rewards = iter(found.rewards)

    def rewarded(turns: Sequence[Turn]) -> tuple[Turn, ...]:
        return tuple(replace(turn, reward=next(rewards, 0.0)) if turn.role == ASSISTANT else turn for turn in turns)

    return replace(
        trajectory,
        turns=rewarded(trajectory.turns),
        branches=tuple(replace(branch, turns=rewarded(branch.turns)) for branch in trajectory.branches),
        reward=found.reward or 0.0,
        success=bool(found.success),
        reward_components=dict(found.components),
    )


def versions(plan: ForkPlan) -> list[WeightVersion]:
    """Versions of the log whose groups the fork may train on."""
    head = plan.fork.head
    steps = range(plan.fork.last_source_step + 1, head.step + 1)
    return [WeightVersion(epoch_of(step, head.lineage) or 0, step) for step in steps]
