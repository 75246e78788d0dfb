"""Every key of a run's Redis, and every file and folder of a run: each is removed in turn."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared.queue.client import command, connect
from shared.run.folder import RunFolder
from tests.system import removal
from tests.system.removal import back, further, kill_all, remove, running
from tools.chaos import logs
from tools.chaos.arena import Arena
from volley.runs.record import stored
from volley_proof.verify.command import verify

CACHES = (
    ".secrets",
    "config.yaml",
    "logs",
    "processes.json",
    "published",
    "pulled",
    "redis/redis.conf",
    "services.yaml",
)
ENDS = {"config.yaml", "run.json", "checkpoints"}
"""Without these no command can go on by itself."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return removal.make(tmp_path_factory.mktemp("pristine"))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_survives_the_loss_of_a_key_and_of_what_its_services_read_at_their_start(
    pristine: RunFolder, tmp_path: Path
):
    run = removal._copy(pristine, tmp_path)

    async def session() -> None:
        async with running(stored(run.path)[0]) as arena:
            await further(arena)
            await arena.redis("DEL", f"{{{run.name}}}:st")
            await further(arena)
            remove(run.checkpoints)
            await further(arena)
            await arena.until(lambda: any(run.checkpoints.glob("e*/manifest.json")), "no new checkpoint")
            remove(run.published)
            os.kill(arena.child("rollout-0").pid, signal.SIGKILL)  # the next one needs the chunks
            await back(arena)
            for name in CACHES:
                remove(run.path / name)
            await further(arena)
            kill_all(arena)
            await back(arena)

    asyncio.run(session())
    assert logs.crashes(run.logs) == []
    assert verify(run)["ok"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_key_and_every_field_of_redis(pristine: RunFolder, tmp_path: Path):
    """Removed, and replaced by one of another type, in a run that goes on."""
    run = removal._copy(pristine, tmp_path)

    async def lose(arena: Arena, *words: str) -> None:
        await arena.redis(*words)
        await further(arena)

    async def session() -> None:
        async with running(stored(run.path)[0]) as arena:
            await further(arena)
            keys = sorted(key.decode() for key in await arena.redis("KEYS", "*"))
            assert len(keys) > 5
            for key in keys:
                await lose(arena, "DEL", key)
                await lose(arena, "EVAL", "redis.call('DEL', KEYS[1]); redis.call('SET', KEYS[1], 'x')", "1", key)
            state = f"{{{run.name}}}:st"
            for field in await arena.redis("HKEYS", state):
                await lose(arena, "HDEL", state, field.decode())
            stream = f"{{{run.name}}}:q"
            await lose(arena, "XTRIM", stream, "MAXLEN", "0")
            fence = (await arena.redis("HGET", state, "fence")).decode()
            await lose(arena, "XGROUP", "DESTROY", stream, f"t{fence}")

    asyncio.run(session())
    assert logs.crashes(run.logs) == []
    proof = verify(run)
    assert proof["ok"], proof["violations"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_password_that_redis_refuses_for_seconds_while_services_restart(pristine: RunFolder, tmp_path: Path):
    run = removal._copy(pristine, tmp_path)

    async def session() -> None:
        async with running(stored(run.path)[0]) as arena:
            await further(arena)
            password = (run.secrets / "redis").read_text(encoding="utf-8")
            host, port = arena.links["redis"].target or ("", 0)
            async with connect(f"redis://:{password}@{host}:{port}/0") as admin:
                await command(admin, "CONFIG", "SET", "requirepass", "another")
                await command(admin, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                kill_all(arena, but=("redis",))
                await asyncio.sleep(6.0)
                await command(admin, "CONFIG", "SET", "requirepass", password)
            await back(arena)

    asyncio.run(session())
    assert logs.crashes(run.logs) == []
    assert verify(run)["ok"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_file_and_folder_before_the_run_is_continued(pristine: RunFolder, tmp_path: Path):
    found = removal.before_up(pristine, tmp_path)
    assert found.wrong == []
    assert set(found.ended) <= ENDS
    assert len(found.went_on) > 40


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_file_and_folder_while_the_run_goes_on(pristine: RunFolder, tmp_path: Path):
    found = removal.while_it_runs(pristine, tmp_path)
    assert found.wrong == []
    assert len(found.went_on) > 40
