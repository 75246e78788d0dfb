"""`volley reverify`: replay a run's archived episodes in the current environments, and compare their rewards.

Every trained episode is replayed with its task, seed and the model's messages. Nothing is written into the run. A
group trains by the differences between its rewards, so the comparison counts groups in which these changed. Rewards
of judges of whole groups are those that were recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from shared import config
from shared.clients.env import EnvClient
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.models.content import with_content
from shared.models.hub import model_folder
from shared.run import archive, commits, trust
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.types import Group, WeightVersion
from volley.printing import join_lines, print_result
from volley.reporting.working import Tell, working
from volley.run_arguments import add_run_dir
from volley_proof.reverify.episodes import ReplayedRewards, replay_rewards, with_judgements
from volley_proof.reverify.service import environments_of

_AT_ONCE = 32
_MOST_SHOWN = 5


@dataclass(slots=True)
class _Tally:
    """Counts of one environment.

    `groups`: groups whose reward differences changed; of these, `silenced` have none now, and `awakened` had none.
    """

    episodes: int = 0
    changed: int = 0
    was: list[float] = field(default_factory=list[float])
    now: list[float] = field(default_factory=list[float])
    was_success: int = 0
    now_success: int = 0
    n_groups: int = 0
    groups: int = 0
    silenced: int = 0
    awakened: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--env", metavar="NAME", help="only episodes of that environment")
    parser.add_argument("--by", metavar="NAME", help="environment to replay them in, e.g. its next version NAME@2")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir, only=arguments.env, instead=arguments.by)


def main(run_dir: Path, *, only: str | None, instead: str | None) -> int:
    """Print the result. Exit code 0 if every episode could be replayed, else 1.

    Args:
        only: environment whose episodes are replayed; all by default.
        instead: environment to replay them in, such as another version.

    Raises:
        ConfigError: the folder is not that of a run, or `instead` without `only`.
    """
    RunFolder(run_dir).check()
    folder = RunFolder(run_dir.absolute())
    trust.check(folder)
    if instead is not None and only is None:
        raise ConfigError("--by needs --env", "name the environment of the episodes to replay with --env NAME")
    with working("replaying episodes") as tell:
        result = asyncio.run(_reverified(folder, only, instead, tell))
    print_result(result, lambda: format_result(result))
    return 1 if any(row["skipped"] for row in result["environments"].values()) or not result["environments"] else 0


def format_result(result: Mapping[str, Any]) -> str:
    """Result as a table."""
    if not result["environments"]:
        return "no archived episode to replay"
    lines = [
        f"{'environment':<24}{'episodes':>9}{'changed':>9}  {'reward':<18}{'success':<18}groups with changed advantages"
    ]
    for name, row in result["environments"].items():
        reward = f"{row['reward'][0]:.3f} -> {row['reward'][1]:.3f}" if row["reward"] else "-"
        success = f"{row['success'][0]:.1%} -> {row['success'][1]:.1%}" if row["success"] else "-"
        groups = f"{row['groups_changed']} of {row['groups']}"
        if row["groups_changed"]:
            groups += f" ({row['silenced']} with equal rewards now, {row['awakened']} with equal rewards before)"
        lines.append(f"{name:<24}{row['episodes']:>9}{row['changed']:>9}  {reward:<18}{success:<18}{groups}")
        lines += [f"  not replayed: {n}: {why}" for why, n in row["skipped"].items()]
    for row in result["changed"][:_MOST_SHOWN]:
        was, now = f"reward {row['was']:g}", f"{row['reward']:g}"
        lines.append(
            f"  step {row['step']}, ticket {row['ticket']}, sample {row['sample_index']}, {row['task']}: {was} -> {now}"
        )
    if len(result["changed"]) > _MOST_SHOWN:
        lines.append(f"  and {len(result['changed']) - _MOST_SHOWN} more (--json lists all)")
    return join_lines(lines)


async def _reverified(folder: RunFolder, only: str | None, instead: str | None, tell: Tell) -> dict[str, Any]:
    run = config.load([folder.config]).config
    model = await asyncio.to_thread(model_folder, run.model.path, folder.path)
    await asyncio.to_thread(with_content, run, model)  # its tokenizer may have changed since
    tokenizer = await asyncio.to_thread(ChatTokenizer, model)
    async with environments_of(folder) as client:
        return await _replay_all(_groups(folder, run.run.name, tell), client, tokenizer, run.run.seed, only, instead)


async def _replay_all(
    groups: Iterable[tuple[WeightVersion, Group]],
    client: EnvClient,
    tokenizer: ChatTokenizer,
    seed: int,
    only: str | None,
    instead: str | None,
) -> dict[str, Any]:
    tallies, changed = defaultdict[str, _Tally](_Tally), list[dict[str, Any]]()
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(group: Group, n: int) -> ReplayedRewards:
        async with slots:
            found = await replay_rewards(client, tokenizer, group.trajectories[n], seed, instead or group.env)
            return with_judgements(found, group, n)

    for version, group in groups:
        if only is None or group.env == only:
            found = await asyncio.gather(*(one(group, n) for n in range(len(group.trajectories))))
            _count(tallies[group.env], found)
            changed += [{"step": version.step, **asdict(row)} for row in found if row.changed]
    return {"environments": {name: _row(tally) for name, tally in sorted(tallies.items())}, "changed": changed}


def _groups(folder: RunFolder, run: str, tell: Tell) -> Iterator[tuple[WeightVersion, Group]]:
    """Yield the groups of all steps along the lineage, in order, one at a time."""
    head = commits.newest(folder)
    lineage, lineage_end = (head.lineage, head.step) if head else ((), 0)
    for version in archive.versions(folder.archive):
        if in_lineage(version, lineage):
            tell(f"step {version.step} of {lineage_end}")
            for payload in archive.read(folder.archive, run, version):
                yield version, Group.decode(payload)


def _count(tally: _Tally, found: Sequence[ReplayedRewards]) -> None:
    tally.n_groups += 1
    for row in found:
        tally.episodes += 1
        if row.reward is None:
            tally.skipped[row.why] += 1
            continue
        tally.changed += row.changed
        tally.was.append(row.was)
        tally.now.append(row.reward)
        tally.was_success += row.was_success
        tally.now_success += bool(row.success)
    if all(row.reward is not None for row in found):
        _compare(tally, [row.was for row in found], [row.reward or 0.0 for row in found])


def _compare(tally: _Tally, was: Sequence[float], now: Sequence[float]) -> None:
    before, after = _centred(was), _centred(now)
    if not all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(before, after, strict=True)):
        tally.groups += 1
        tally.silenced += not any(after)
        tally.awakened += not any(before)


def _centred(rewards: Sequence[float]) -> list[float]:
    middle = mean(rewards)
    return [0.0 if math.isclose(reward, middle, abs_tol=1e-12) else reward - middle for reward in rewards]


def _row(tally: _Tally) -> dict[str, Any]:
    n = len(tally.was)
    return {
        "episodes": tally.episodes,
        "changed": tally.changed,
        "reward": [mean(tally.was), mean(tally.now)] if n else None,
        "success": [tally.was_success / n, tally.now_success / n] if n else None,
        "groups": tally.n_groups,
        "groups_changed": tally.groups,
        "silenced": tally.silenced,
        "awakened": tally.awakened,
        "skipped": dict(tally.skipped.most_common(20)),
    }
