"""Task folders in real containers: Docker Engine with Compose, and the image python:3.13-slim."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from packages.sandbox.tests.harbor_service import harbor_settings, playing, served, taken, task_of, worker_in
from packages.sandbox.tests.harbor_tasks import TASK_TOML, TEST_SH, begin, call, sum_task
from tests.env.conftest import open_service
from tests.support.docker import docker, why_no_docker

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
SOLVE = "echo $(( $(paste -sd+ data/numbers.txt) )) > total.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := why_no_docker():
        pytest.skip(why)
    return tmp_path_factory.mktemp("docker")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(partial(open_service, folder / "environments"), environment="docker") as opened:
        yield opened


def containers(run: str = "tested") -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label=volley.run={run}").stdout.split()


def images(worker: int) -> list[str]:
    """Images that a worker's trials have built."""
    names = docker("image", "ls", "--format", "{{.Repository}}").stdout.split()
    return [name for name in names if name.startswith("volley-") and f"-{worker}-" in name]


async def test_tasks_are_proved_and_played_in_containers(client: httpx.AsyncClient) -> None:
    one = await playing(client)
    assert (await one.run("cat data/numbers.txt; echo $UNIT; pwd")).split() == ["1", "8", "21", "metre", "/app"]
    assert await one.run("ls /sys/class/net") == "lo"
    await one.run("(while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 & env -i setsid sleep 300 &")
    assert (await one.say("Done."))["reward"] == 0.0
    two = await playing(client)
    await two.run(SOLVE)
    assert (await two.say("Done."))["reward"] == 1.0


async def test_programs_that_the_model_replaces_do_not_fool_a_fresh_container(client: httpx.AsyncClient) -> None:
    name = await task_of(client, judge="fresh")
    for command, reward in ((SOLVE, 1.0), ("printf '#!/bin/sh\\nexit 0' > /usr/local/bin/bash; chmod +x $_", 0.0)):
        one = await begin(client, name)
        await one.run(command)
        assert (await one.say("Done."))["reward"] == reward


async def test_containers_of_a_killed_worker_are_removed(client: httpx.AsyncClient, folder: Path) -> None:
    name = await task_of(client)
    one = await begin(client, name)
    await one.run("true")
    left = await asyncio.to_thread(containers)
    os.kill(killed := worker_in(folder), signal.SIGKILL)
    answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("true")})
    assert (answer.status_code, len(left)) == (500, 1)
    two = await begin(client, name)
    await two.run(SOLVE)
    assert (await two.say("Done."))["reward"] == 1.0
    async with asyncio.timeout(60):
        while {*left} & {*await asyncio.to_thread(containers)} or await asyncio.to_thread(images, killed):
            await asyncio.sleep(0.5)


async def test_services_with_their_own_processes_keep_out_of_each_others_containers(
    folder: Path, tmp_path: Path
) -> None:
    """Two services in containers with the machine's network have one engine and one host name."""
    apart = tmp_path / "python"
    unshared = "unshare --user --map-root-user --pid --fork --mount-proc --kill-child"
    apart.write_text(f'#!/bin/sh\nexec {unshared} {harbor_settings(folder).section.python} "$@"\n', encoding="utf-8")
    apart.chmod(0o755)
    changes = {"environment": "docker", "python": apart}
    one, two = tmp_path / "one", tmp_path / "two"
    async with (
        served(partial(open_service, one / "environments"), **changes) as here,
        served(partial(open_service, two / "environments"), **changes) as there,
    ):
        before = {*await asyncio.to_thread(containers)}
        lost, kept = await playing(here), await playing(there)
        await lost.run("true")
        left = {*await asyncio.to_thread(containers)} - before
        await kept.run("true")
        os.kill(worker_in(one), signal.SIGKILL)
        answer = await lost.ask("step", request_id="x", message={"role": "assistant", "content": call("true")})
        assert (answer.status_code, len(left)) == (500, 1)
        again = await playing(here)
        async with asyncio.timeout(60):
            while left & {*await asyncio.to_thread(containers)}:
                await asyncio.sleep(0.5)
        for episode in (kept, again):
            await episode.run(SOLVE)
            assert (await episode.say("Done."))["reward"] == 1.0


async def test_a_container_that_is_removed_gives_no_reward(client: httpx.AsyncClient) -> None:
    one = await playing(client)
    await one.run(SOLVE)
    await asyncio.to_thread(docker, "rm", "--force", *containers())
    while (answer := await one.ask("finish", request_id="x")).status_code == 429:
        await asyncio.sleep(0.1)
    assert answer.status_code == 500, answer.text


SOCKET = "/var/run/docker.sock"


@pytest.mark.skipif(not Path(SOCKET).exists(), reason=f"the engine has no socket at {SOCKET}")
async def test_episodes_wait_for_an_engine_that_is_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := tmp_path / "engine").symlink_to(SOCKET)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{link}")
    async with served(partial(open_service, tmp_path / "environments"), environment="docker") as client:
        name = await task_of(client)
        link.unlink()
        lost = await begin(client, name)
        while (answer := await lost.ask("finish", request_id="x")).status_code == 429:
            await asyncio.sleep(0.1)
        assert (answer.status_code, answer.json()["title"]) == (500, "Sandbox lost"), answer.text
        answer = await client.post("/episodes", json={"request_id": "x", "env": name, "split": "train", "index": 0})
        assert (answer.status_code, "container engine does not answer" in answer.text) == (429, True), answer.text
        assert "does not answer" in (await client.get(f"/environments/{name}")).json()["versions"][0]["trouble"]
        link.symlink_to(SOCKET)
        one = await begin(client, name)
        await one.run(SOLVE)
        assert (await one.say("Done."))["reward"] == 1.0


async def test_a_container_that_fills_its_disk_gets_0_and_is_removed(client: httpx.AsyncClient) -> None:
    task = sum_task(**{"task.toml": TASK_TOML.replace("memory_mb", "storage_mb = 20\nmemory_mb")})
    row = await taken(client, ("", task))
    one = await begin(client, str(row["name"]))
    last = await one.say(call(f"{SOLVE}; head -c 60M /dev/zero > big; sleep 40"))
    assert (last["reward"], last["truncated"]) == (0.0, True), last
    assert "exceeded 20 MiB" in last["info"]["verifier"]


COMPOSE = """
services:
  main: {networks: [back], depends_on: {words: {condition: service_healthy}}}
  words:
    image: python:3.13-slim
    networks: [back]
    command: [sh, -c, 'mkdir /w; echo 30 > /w/total; exec python3 -m http.server --directory /w 8000']
    healthcheck: {test: [CMD, bash, -c, 'echo > /dev/tcp/127.0.0.1/8000'], interval: 1s}
networks:
  back:
"""
FETCH = (
    "python3 -c \"import urllib.request as u; print(u.urlopen('http://words:8000/total').read().decode())\" > total.txt"
)


async def test_services_of_a_compose_file_reach_each_other_alone_and_files_in_logs_count(
    client: httpx.AsyncClient,
) -> None:
    task = sum_task(
        **{
            "task.toml": TASK_TOML.replace("memory_mb", "storage_mb = 20\nmemory_mb"),
            "environment/docker-compose.yaml": COMPOSE,
            "solution/solve.sh": f"#!/bin/bash\ncd /app; {FETCH}\n",
        }
    )
    row = await taken(client, ("", task))
    assert row["state"] == "active", (row["why"], row["report"])
    one = await begin(client, str(row["name"]))
    assert await one.run(f"{FETCH}; cat total.txt") == "30"
    named = await asyncio.to_thread(docker, "network", "ls", "--format", "{{.Name}}", "--filter", "name=volley-")
    inspected = docker("network", "inspect", "--format", "{{.Internal}}", *named.stdout.split()).stdout.split()
    assert {*inspected} == {"true"}
    last = await one.say(call("head -c 60M /dev/zero > /logs/agent/big; sleep 40"))
    assert (last["reward"], "exceeded 20 MiB" in last["info"]["verifier"]) == (0.0, True), last


async def test_what_a_container_puts_in_place_of_its_reward_is_not_followed(client: httpx.AsyncClient) -> None:
    planted = "for name in reward.txt test-stdout.txt; do ln -sf /etc/hostname /logs/verifier/$name; done"
    tests = f"{TEST_SH}[ ! -e link ] || {planted}\n"
    row = await taken(client, ("", sum_task(**{"tests/test.sh": tests})))
    assert row["state"] == "active", (row["why"], row["report"])
    one = await begin(client, str(row["name"]))
    await one.run("touch link")
    while (answer := await one.ask("finish", request_id="x")).status_code == 429:
        await asyncio.sleep(0.1)
    assert (answer.status_code, "/logs/verifier/reward.txt is not a plain file" in answer.text) == (500, True)


async def test_a_container_that_waits_for_a_processor_keeps_its_time(client: httpx.AsyncClient) -> None:
    toml = TASK_TOML.replace("timeout_sec = 10.0", "timeout_sec = 2.0")
    burning = "for ((i = 0; i < 100000; i++)); do :; done\n"
    tests = {"tests/check.sh": f'{burning}[ ! -e loop ] || bash loop; [ "$(cat total.txt)" = 30 ]\n'}
    row = await taken(client, ("", sum_task(**{"task.toml": toml, **tests})))
    assert row["state"] == "active", (row["why"], row["report"])
    for more, cpus, reward in (("true", 0.03, 1.0), ("echo 'while :; do :; done' > loop", 0.2, 0.0)):
        one = await begin(client, str(row["name"]))
        await one.run(f"{SOLVE}; {more}")
        await asyncio.to_thread(docker, "update", f"--cpus={cpus}", *containers())
        assert (await one.say("Done."))["reward"] == reward, more


async def test_an_image_that_does_not_exist_is_named(client: httpx.AsyncClient) -> None:
    row = await taken(client, ("", sum_task(**{"environment/Dockerfile": "FROM absent.invalid/image:1\n"})))
    assert (row["state"], "absent.invalid/image:1" in row["why"]) == ("rejected", True), row["why"]
