"""Archived episodes, judged again by an environment service in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.env.app import open_env
from services.env.settings import from_config
from shared import config
from shared.clients.env import EnvClient, Opening
from shared.errors import ConfigError, RateLimited
from shared.run import seeding
from shared.run.folder import RunFolder
from shared.types import ASSISTANT, Branch, Trajectory, Turn, VersionSpan
from tests.support.tokenizer import tiny_tokenizer
from volley.runs.run_file import RunRecord, write_record
from volley_proof.reverify.command import format_result
from volley_proof.reverify.episodes import replay_rewards, said
from volley_proof.reverify.service import environments_of

SEED, TICKET = 3, 7


class BusyClient(EnvClient):
    """Of a service that has not drawn the first layout that it is asked for."""

    n_refused = 0

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        if not self.n_refused:
            self.n_refused += 1
            raise RateLimited("1398 layouts are drawn by now", retry_after_s=0.01)
        return await super().create(request_id, env, split, index, seed=seed)


@asynccontextmanager
async def environments(folder: Path, client: type[EnvClient] = EnvClient) -> AsyncIterator[EnvClient]:
    run = config.validate({"run": {"dir": str(folder)}, "model": {"path": "m"}, "data": {"env": "frozen_lake"}}).config
    async with (
        open_env(from_config(run)) as service,
        client("http://env", transport=httpx.ASGITransport(service.app)) as opened,
    ):
        yield opened


async def played(client: EnvClient, *, solved: bool) -> Trajectory:
    """An episode as the orchestrator records it: a demonstration, or somebody who says nothing."""
    tokenizer = tiny_tokenizer()
    shown = (await client.demonstration("frozen_lake", "train", 5)).messages
    texts = [message["content"] for message in shown if message["role"] == "assistant"] if solved else [""] * 6
    opened = await client.create("r", "frozen_lake", "train", 5, seed=seeding.env_seed(SEED, TICKET, 0))
    ids = tokenizer.render_prompt(opened.messages)
    mask, turns, reward, success = [0] * len(ids), [Turn(0, len(ids), "prompt")], 0.0, False
    for n, text in enumerate(texts):
        reply = await client.step(opened.episode_id, str(n), text)
        sampled = [*tokenizer.encode(text), tokenizer.eos_id]
        turns.append(Turn(len(ids), len(ids) + len(sampled), ASSISTANT, reply.reward))
        ids, mask, reward, success = ids + sampled, mask + [1] * len(sampled), reward + reply.reward, reply.success
        if reply.terminated or reply.truncated:
            break
    spans = [VersionSpan("e000001-s000000", turn.start, turn.end) for turn in turns if turn.role == ASSISTANT]
    return Trajectory(
        ticket=TICKET,
        sample_index=0,
        attempt=0,
        env="frozen_lake",
        task=opened.task,
        prompt_len=turns[0].end,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.zeros(len(ids), np.float32),
        versions=tuple(spans),
        turns=tuple(turns),
        reward=reward,
        success=success,
        status="completed",
    )


@pytest.mark.parametrize("solved", [True, False])
async def test_the_same_environment_gives_the_same_reward(tmp_path: Path, solved: bool) -> None:
    async with environments(tmp_path) as client:
        trajectory = await played(client, solved=solved)
        trajectory.validate()
        row = await replay_rewards(client, tiny_tokenizer(), trajectory, SEED, "frozen_lake")
        assert (row.why, row.changed, row.success) == ("", False, solved)
        assert row.reward == pytest.approx(trajectory.reward)
        other = replace(trajectory, reward=trajectory.reward + 0.5)
        assert (await replay_rewards(client, tiny_tokenizer(), other, SEED, "frozen_lake")).changed


async def test_packages_of_the_folder_of_start_are_not_imported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("{model: {path: m}, data: {env: frozen_lake}}", encoding="utf-8")
    write_record(folder, RunRecord("d", 0, {}, {}, 0.0, 0.0, finished=True, cwd=str(tmp_path)))
    for name in ("services", "shared"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    async with environments_of(folder) as client:
        assert (await client.create("r", "frozen_lake", "train", 0, seed=0)).messages


async def test_an_environment_that_is_not_ready_for_a_task_is_asked_again(tmp_path: Path) -> None:
    """Its layouts are drawn one after the other."""
    async with environments(tmp_path) as client:
        trajectory = await played(client, solved=True)
    async with environments(tmp_path, BusyClient) as client:
        found = await replay_rewards(client, tiny_tokenizer(), trajectory, SEED, "frozen_lake")
    assert (found.why, found.reward) == ("", trajectory.reward)


async def test_what_cannot_be_played_again_is_told(tmp_path: Path) -> None:
    async with environments(tmp_path) as client:
        trajectory = await played(client, solved=True)

        async def why(changed: Trajectory, env: str = "frozen_lake") -> str:
            row = await replay_rewards(client, tiny_tokenizer(), changed, SEED, env)
            assert not row.changed
            return row.why

        assert "NotFound: there is no environment 'gone'" in await why(trajectory, "gone")
        assert "does not start with its split and index" in await why(replace(trajectory, task="a maze"))
        assert "now has task train/5@" in await why(replace(trajectory, task="train/5@0123456789ab"))
        longer = replace(trajectory, turns=(*trajectory.turns, trajectory.turns[-1]))
        assert "ends the episode after" in await why(longer)


async def test_the_words_of_a_turn_are_those_that_were_sampled(tmp_path: Path) -> None:
    async with environments(tmp_path) as client:
        shown = (await client.demonstration("frozen_lake", "train", 5)).messages
        trajectory = await played(client, solved=True)
    assert said(tiny_tokenizer(), trajectory) == [m["content"] for m in shown if m["role"] == "assistant"]


def test_the_table_says_what_would_have_been_taught_otherwise() -> None:
    row = {
        "episodes": 16,
        "changed": 3,
        "reward": [0.25, 0.5],
        "success": [0.25, 0.5],
        "groups": 2,
        "groups_changed": 1,
        "silenced": 0,
        "awakened": 1,
        "skipped": {"NotFound: gone": 2},
    }
    text = format_result({"environments": {"adder@1": row}, "changed": []})
    assert "0.250 -> 0.500" in text
    assert "1 of 2 (0 with equal rewards now, 1 with equal rewards before)" in text
    assert "not replayed: 2: NotFound: gone" in text


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    from volley_proof.reverify.command import main

    with pytest.raises(ConfigError, match="is not the folder of a run"):
        main(tmp_path, only=None, instead=None)


async def test_an_episode_of_several_sequences_is_not_replayed(tmp_path: Path):
    async with environments(tmp_path) as client:
        one = await played(client, solved=True)
        branch = Branch(0, 1, one.token_ids[1:], one.loss_mask[1:], one.logprobs[1:], one.versions, ())
        found = await replay_rewards(client, tiny_tokenizer(), replace(one, branches=(branch,)), SEED, "frozen_lake")
    assert (found.reward, found.changed) == (None, False)
    assert "several sequences" in found.why
