"""Built-in environments in worker processes: answers as in threads, and what becomes of episodes when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.env.backend import EnvironmentBackend
from services.env.catalogue import Catalogue
from services.env.episode_types import assistant
from services.env.threads import ThreadRunner
from shared.errors import GivenUp, InputError, NotFound, VolleyError
from tests.env.conftest import OpenClient
from volley_environments.workers.pool import WorkerSettings
from volley_environments.workers.processes import InProcesses, ProcessEpisode, Processes

SETTINGS = WorkerSettings(n_threads=2, deadline_s=20.0, max_waiting=64)


@asynccontextmanager
async def running(n: int, settings: WorkerSettings = SETTINGS) -> AsyncIterator[Processes]:
    async with Processes(n, settings) as pool:
        keeping = asyncio.ensure_future(pool.keep())
        try:
            yield pool
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


def backends(pool: Processes, name: str, config: Mapping[str, Any]) -> tuple[EnvironmentBackend, EnvironmentBackend]:
    """The same environment in processes, and in threads of this one."""
    runner = ThreadRunner(2, 20.0, 64)
    found = Catalogue(runner, {name: config}, processes=pool).get(name).backend
    assert isinstance(found, InProcesses)
    return found, found.local


async def both(pool: Processes) -> None:
    async with asyncio.timeout(60):
        while pool.n_running < 2:
            await asyncio.sleep(0.01)


async def test_an_environment_in_processes_is_the_one_in_threads() -> None:
    async with running(1) as pool:
        for name, config, text in (
            ("frozen_lake", {"size": 4}, "<answer>Right || Down</answer>"),
            ("text_to_sql", {}, "```sql\nSELECT 1\n```"),
        ):
            there, here = backends(pool, name, config)
            assert await there.splits() == await here.splits()
            assert await there.num_tasks("train") == await here.num_tasks("train")
            assert await there.task("train", 7) == await here.task("train", 7)
            assert await there.demonstration("train", 7) == await here.demonstration("train", 7)
            one, other = await there.reset("train", 7, 3), await here.reset("train", 7, 3)
            assert (one.task, one.opening, list(one.tools)) == (other.task, other.opening, list(other.tools))
            assert await one.step(assistant(text)) == await other.step(assistant(text))
            assert await one.step(assistant("\ud800 half of a pair")) == await other.step(
                assistant("\ud800 half of a pair")
            )


async def test_packages_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("services", "shared"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    async with running(1) as pool:
        there, _ = backends(pool, "frozen_lake", {})
        assert (await there.reset("train", 0, 0)).opening


async def test_errors_of_an_environment_come_as_they_are() -> None:
    async with running(1) as pool:
        there, here = backends(pool, "frozen_lake", {})
        for split, index in (("train", 10**9), ("night", 0)):
            with pytest.raises(NotFound) as one:
                await there.reset(split, index, 0)
            with pytest.raises(NotFound) as other:
                await here.reset(split, index, 0)
            assert (one.value.detail, one.value.hint) == (other.value.detail, other.value.hint)
        refused, _ = backends(pool, "gymnasium", {"id": "NoSuch-v0"})
        with pytest.raises(InputError, match="NoSuch"):
            await refused.reset("train", 0, 0)


async def test_a_dead_process_loses_its_episodes_and_no_others_and_is_replaced() -> None:
    async with running(2) as pool:
        there, _ = backends(pool, "frozen_lake", {})
        await both(pool)
        episodes = [await there.reset("train", index, 0) for index in range(5)]
        assert all(isinstance(episode, ProcessEpisode) for episode in episodes)
        by_pid: dict[int, list[ProcessEpisode]] = {}
        for episode in episodes:
            assert isinstance(episode, ProcessEpisode)
            by_pid.setdefault(episode.worker.pid, []).append(episode)
        assert sorted(map(len, by_pid.values())) == [2, 3]
        (dead, lost), (_, kept) = by_pid.items()
        waiting = asyncio.ensure_future(lost[0].step(assistant("<answer>Right</answer>")))
        os.kill(dead, signal.SIGKILL)
        await asyncio.wait([waiting])  # it was answered, or is lost
        assert waiting.exception() is None or isinstance(waiting.exception(), NotFound)
        for episode in lost[1:]:
            with pytest.raises(NotFound, match="has ended"):
                await episode.step(assistant("<answer>Right</answer>"))
        for episode in kept:
            assert (await episode.step(assistant("<answer>Right</answer>"))).info.error is None
        await both(pool)
        assert (await there.reset("train", 9, 0)).task
        for episode in (*lost, *lost, *kept):
            await episode.close()


async def test_an_episode_whose_begin_is_cancelled_is_none() -> None:
    """It is closed before its reset has ended; a step finds nothing."""
    async with running(1) as pool:
        there, _ = backends(pool, "sokoban", {"dim_room": [9, 9]})
        worker = (await _patiently(there)).worker
        beginning = asyncio.ensure_future(there.reset("train", 1, 0))
        await asyncio.sleep(0)
        while worker.n_episodes < 2:
            await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.wait([beginning])
        assert worker.n_episodes == 1
        await there.task("train", 1)  # its threads are two, and this comes after the reset
        await there.reset("train", 1, 0)
        with pytest.raises(NotFound):
            await pool.step(worker, "e2", assistant("<answer>Up</answer>"))


async def test_a_process_that_does_not_answer_is_killed_and_replaced() -> None:
    async with running(1, WorkerSettings(2, 0.5, 64, grace_s=0.5)) as pool:
        there, _ = backends(pool, "frozen_lake", {})
        episode = await _patiently(there)
        os.kill(episode.worker.pid, signal.SIGSTOP)
        with pytest.raises(GivenUp, match="did not answer"):
            await episode.step(assistant("<answer>Right</answer>"))
        async with asyncio.timeout(60):
            while episode.worker.alive:
                await asyncio.sleep(0.01)
        with pytest.raises(NotFound):
            await episode.step(assistant("<answer>Right</answer>"))
        assert (await _patiently(there)).worker.pid != episode.worker.pid


async def _patiently(there: EnvironmentBackend) -> ProcessEpisode:
    """A process may take longer to start than these calls may take."""
    async with asyncio.timeout(60):
        while True:
            try:
                episode = await there.reset("train", 0, 0)
            except VolleyError:
                await asyncio.sleep(0.05)
            else:
                assert isinstance(episode, ProcessEpisode)
                return episode


async def test_a_dead_process_is_a_404_to_its_clients_and_costs_the_service_nothing_else(
    open_client: OpenClient,
) -> None:
    """404 to a step is what the orchestrator calls EpisodeLost, and plays again."""
    async with open_client(n_processes=1) as client:
        body = {"request_id": "a", "env": "frozen_lake", "split": "train", "index": 0}
        made = (await client.post("/episodes", json=body)).json()
        before = _workers()
        assert len(before) == 1
        os.kill(before[0], signal.SIGKILL)
        step = {"request_id": "1", "message": {"role": "assistant", "content": "<answer>Right</answer>"}}
        answer = await client.post(f"/episodes/{made['episode_id']}/step", json=step)
        assert answer.status_code == 404
        assert "worker process" in answer.json()["detail"]
        again = await client.post("/episodes", json={**body, "request_id": "b"})
        assert again.status_code == 201
        assert again.json()["messages"] == made["messages"]
        assert _workers() != before


def test_no_process_is_left_when_the_service_is_gone() -> None:
    assert _workers() == []


def _workers() -> list[int]:
    """Process ids of our own worker processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            parent = int((process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"volley_environments.workers.worker_main" in (process / "cmdline").read_bytes()
            ):
                found.append(int(process.name))
    return found
