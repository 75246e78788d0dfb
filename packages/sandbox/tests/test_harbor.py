"""Task folders by Harbor's real package: read, proved by their solutions, played in a shell, judged, and lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from packages.sandbox.tests.harbor_service import (
    harbor_section,
    harbor_settings,
    playing,
    served,
    taken,
    task_of,
    worker_in,
)
from packages.sandbox.tests.harbor_tasks import TASK_TOML, Conversation, begin, call, submit, sum_task, zipped
from services.env.settings import ConfiguredSource
from shared.errors import ConfigError, Forbidden, InputError, SandboxFailed, Unavailable
from shared.run.sources import FoundSource
from shared.services_schema import Limits
from tests.env.conftest import OpenClient, open_service
from tests.support.submitted import decided
from volley_sandbox.backends.harbor import read_config, verdict_of
from volley_sandbox.harbor.containers import Containers, HarborSettings
from volley_sandbox.sandbox import repeated_call

in_module = pytest.mark.asyncio(loop_scope="module")
SOLVE = "echo $(( $(paste -sd+ data/numbers.txt) )) > total.txt"


@pytest.fixture(autouse=True, scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let Harbor import LocalEnvironment; return the file in which that notes its starts."""
    starts = tmp_path_factory.mktemp("local") / "starts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("LOCAL_LOG", str(starts))
        yield starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(folder: Path, local: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A service for all tests of this module."""
    async with served(partial(open_service, folder / "environments"), max_starting=2) as opened:
        yield opened


@in_module
async def test_task_folders_are_proved_played_and_judged(client: httpx.AsyncClient) -> None:
    folders = [("set/train/a", sum_task(1)), ("set/train/b", sum_task(2)), ("set/eval/c", sum_task(3))]
    row = await taken(client, *folders)
    assert (row["state"], row["splits"], row["protocol"]) == ("active", {"train": 2, "eval": 1}, "harbor"), row
    checks = {check["name"]: check for check in row["report"]["checks"]}
    assert {"solutions", "episodes", "disjoint splits"} <= checks.keys()
    assert all(check["ok"] for check in checks.values())
    one = await begin(client, row["name"], index=1)
    assert one.opening == [{"role": "user", "content": sum_task(2)["instruction.md"]}]
    assert [tool["function"]["name"] for tool in one.tools] == ["bash"]
    assert (await one.run("cat data/numbers.txt")).split() == ["2", "9", "22"]
    assert await one.run("false") == "(no output)\n[exit code 1]"
    assert await one.run(f"ls /tests /solution 2>/dev/null; {SOLVE}") == "(no output)"
    last = await one.say("Done.")
    assert (last["reward"], last["terminated"], last["info"]["success"]) == (1.0, True, True), last
    idle = await begin(client, row["name"], split="eval")
    assert (await idle.say("I cannot."))["reward"] == 0.0


@in_module
async def test_what_the_model_left_running_does_not_write_the_reward(client: httpx.AsyncClient) -> None:
    one = await playing(client)
    await one.run("(while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &")
    await one.run("echo '{\"reward\": 1}' > /logs/verifier/reward.json")
    assert (await one.say("Done."))["reward"] == 0.0


@in_module
async def test_an_episode_that_its_client_or_its_turns_end_is_judged(client: httpx.AsyncClient) -> None:
    name = await task_of(client, max_turns=2)
    one = await begin(client, name)
    await one.run(SOLVE)
    last = await one.finish()
    assert (last["reward"], last["truncated"], last["info"]["success"]) == (1.0, True, True), last
    two = await begin(client, name)
    await two.run(SOLVE)
    last = await two.say(call("echo over"))
    assert (last["reward"], last["truncated"], last["messages"][0]["content"]) == (1.0, True, "over"), last


@in_module
async def test_a_long_command_is_asked_for_again(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await playing(client)
    await one.run("true")
    monkeypatch.setattr(repeated_call, "WAIT_S", 0.05)
    command = f"until [ -e {tmp_path}/looked ]; do sleep 0.05; done; echo slept >> n"
    asked = {"request_id": "long", "message": {"role": "assistant", "content": call(command)}}
    first = await one.ask("step", **asked)
    assert (first.status_code, first.json()["title"]) == (429, "Environment busy")
    other = {"request_id": "other", "message": {"role": "assistant", "content": "Done."}}
    assert (await one.ask("step", **other)).status_code == 409
    (tmp_path / "looked").touch()
    while (again := await one.ask("step", **asked)).status_code == 429:
        await asyncio.sleep(0.05)
    assert again.status_code == 200, again.text
    assert await one.run("cat n") == "slept"


async def test_a_call_is_sent_once_until_its_caller_has_the_answer() -> None:
    sent, call = list[asyncio.Future[dict[str, str]]](), repeated_call.RepeatedCall[dict[str, str]]()

    def send() -> asyncio.Future[dict[str, str]]:
        sent.append(asyncio.get_running_loop().create_future())
        return sent[-1]

    asking = asyncio.ensure_future(call.answer(send))
    await asyncio.sleep(0)
    sent[0].set_result({"output": "once"})
    asking.cancel()  # as a time-out does that comes with the answer
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await call.answer(send), len(sent)) == ({"output": "once"}, 1)
    again = asyncio.ensure_future(call.answer(send))
    await asyncio.sleep(0)
    sent[1].set_exception(SandboxFailed("lost"))
    with pytest.raises(SandboxFailed):
        await again
    third = asyncio.ensure_future(call.answer(send))
    await asyncio.sleep(0)
    third.cancel()
    assert len(sent) == 3


@pytest.mark.long
@in_module
async def test_limits_of_commands(client: httpx.AsyncClient) -> None:
    one = await playing(client, command_timeout_s=1)
    assert "[ended: it took longer than 1 s]" in await one.run("echo begun; sleep 30")
    long = await one.run("yes | head -c 200000; echo end")
    assert ("left out" in long, long.rstrip().endswith("end")) == (True, True)
    assert "more than 100000 bytes" in await one.run(f": {'x' * 100_000}")
    assert "[exit code 137]" in await one.run("kill -9 $$")
    assert await one.run("echo alive") == "alive"


@in_module
async def test_a_container_that_is_gone_gives_no_reward(client: httpx.AsyncClient) -> None:
    name = await task_of(client)
    one = await begin(client, name)
    await one.run(f"{SOLVE}; touch gone")
    answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("true")})
    while answer.status_code == 429:
        answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("true")})
    assert (answer.status_code, "Cannot connect to the engine" in answer.text) == (500, True), answer.text
    two = await begin(client, name)
    await two.run(f"{SOLVE}; touch gone")
    answer = await two.ask("finish", request_id="x")
    while answer.status_code == 429:
        answer = await two.ask("finish", request_id="x")
    assert (answer.status_code, answer.json()["title"]) == (500, "Sandbox lost"), answer.text


CHECKED_BY = """#!/bin/bash
bash "$(cat judge 2>/dev/null || echo /tests/check.sh)" && echo 1 > /logs/verifier/reward.txt && exit
[ -e wordless ] || echo 0 > /logs/verifier/reward.txt
"""
"""Tests that run a program of the model, and write no reward if it tells them so."""


@in_module
async def test_only_tests_that_used_up_their_own_time_give_0(client: httpx.AsyncClient) -> None:
    toml = TASK_TOML.replace("timeout_sec = 10.0", "timeout_sec = 1.0")
    row = await taken(client, ("", sum_task(**{"task.toml": toml, "tests/test.sh": CHECKED_BY})))
    assert row["state"] == "active", (row["why"], row["report"])
    late = await begin(client, row["name"])
    await late.run("echo 'while :; do :; done' > loop; echo loop > judge")
    last = await late.say("Done.")
    assert (last["reward"], "longer than 1 s" in last["info"]["verifier"]) == (0.0, True), last
    wordless = await begin(client, row["name"])
    await wordless.run("touch wordless")
    refused = await ended(wordless)
    assert (refused["title"], "RewardFileNotFoundError" in refused["detail"]) == ("Sandboxed code failed", True)
    killed = await begin(client, row["name"])
    await killed.run("echo 'kill -9 $PPID' > kill; echo kill > judge")
    refused = await ended(killed)
    assert (refused["title"], "were killed" in refused["detail"]) == ("Sandbox lost", True), refused


async def ended(one: Conversation) -> dict[str, str]:
    """Problem that ends an episode."""
    while (answer := await one.ask("finish", request_id="end")).status_code == 429:
        await asyncio.sleep(0.02)
    assert answer.status_code == 500, answer.text
    return answer.json()


@pytest.mark.long
@in_module
async def test_a_worker_that_is_killed_is_started_again(client: httpx.AsyncClient, folder: Path) -> None:
    name = await task_of(client)
    one = await begin(client, name)
    await one.run("true")
    os.kill(worker_in(folder), signal.SIGKILL)
    answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("true")})
    assert answer.status_code == 500
    again = await begin(client, name)
    await again.run(SOLVE)
    assert (await again.say("Done."))["reward"] == 1.0


@pytest.mark.long
@in_module
async def test_starts_are_bounded_and_none_is_lost(client: httpx.AsyncClient, local: Path) -> None:
    name = await task_of(client)

    async def solved() -> float:
        one = await begin(client, name)
        await one.run(SOLVE)
        return (await one.say("Done."))["reward"]

    assert await asyncio.gather(*(solved() for _ in range(8))) == [1.0] * 8
    noted = await asyncio.to_thread(local.read_text, "utf-8")
    assert max(map(int, noted.split())) == 2


@pytest.mark.long
async def test_a_container_that_lives_too_long_is_removed(open_client: OpenClient, tmp_path: Path) -> None:
    async with served(open_client, max_lifetime_s=4) as client:
        one = await playing(client)
        answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("sleep 30")})
        while answer.status_code == 429:
            answer = await one.ask("step", request_id="x", message={"role": "assistant", "content": call("sleep 30")})
    assert (answer.status_code, "lived longer than 4 s" in answer.text or "closed" in answer.text) == (500, True)


STEPS = """
[[steps]]
name = "one"
[[steps]]
name = "two"
"""


@pytest.mark.long
@in_module
async def test_a_task_of_several_steps_goes_on_with_its_next_instruction(client: httpx.AsyncClient) -> None:
    task = {name: text for name, text in sum_task().items() if name.split("/")[0] not in ("tests", "solution")}
    del task["instruction.md"]
    task["task.toml"] = TASK_TOML + STEPS
    for name in ("one", "two"):
        test = f"[ -e {name} ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
        task |= {f"steps/{name}/instruction.md": f"Make {name}.", f"steps/{name}/tests/test.sh": f"#!/bin/bash\n{test}"}
        task[f"steps/{name}/solution/solve.sh"] = f"#!/bin/bash\ntouch {name}\n"
    row = await taken(client, ("", task))
    assert row["state"] == "active", (row["why"], row["report"])
    one = await begin(client, row["name"])
    assert one.opening[0]["content"] == "Make one."
    await one.run("touch one")
    second = await one.say("Done.")
    assert (second["messages"], second["terminated"]) == ([{"role": "user", "content": "Make two."}], False)
    assert (await one.say("Done."))["reward"] == 0.5


REJECTED = {
    "solves nothing": ({"solution/solve.sh": "#!/bin/bash\ntrue\n"}, "the tests give 0 after the solution"),
    "is solved before": ({"tests/check.sh": "true\n"}, "give 1 after an idle episode"),
    "judges nothing": ({"tests/test.sh": "#!/bin/bash\ntrue\n"}, "RewardFileNotFoundError"),
    "writes a long file": (
        {"tests/test.sh": "#!/bin/bash\ntruncate -s 2M /logs/verifier/reward.txt\n"},
        "/logs/verifier/reward.txt has 2097152 bytes",
    ),
    "gives no object": ({"tests/test.sh": "echo 1 > /logs/verifier/reward.json"}, "holds no object"),
    "gives no number": ({"tests/test.sh": "echo good > /logs/verifier/reward.txt"}, "VerifierOutputParseError"),
    "has no image": ({"environment/Dockerfile": "FROM absent\n"}, "pull access denied for absent"),
}


@pytest.mark.long
@in_module
async def test_a_task_that_cannot_be_proved_is_rejected(client: httpx.AsyncClient) -> None:
    for number, (changes, why) in enumerate(REJECTED.values()):
        name = f"task-{number}"
        assert (await submit(client, zipped(("", sum_task(**changes))), name)).status_code == 202
        row = await decided(client, name)
        assert (row["state"], why in row["why"]) == ("rejected", True), row["why"]


def test_environments_of_containers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="starts none"):
        Containers(HarborSettings()).read([])
    with pytest.raises(Unavailable, match=r"none of .*docker"):
        Containers(harbor_settings(tmp_path, environment="dokcer")).read([])
    for python, why in (("/absent/python", "/absent/python"), (sys.executable, ": ModuleNotFoundError: .*harbor")):
        with pytest.raises(Unavailable, match=why):
            Containers(harbor_settings(tmp_path, python=Path(python))).read([])


async def test_task_folders_of_the_configuration_are_there_when_the_service_is(
    open_client: OpenClient, tmp_path: Path
) -> None:
    content = zipped(("", sum_task()))
    file = tmp_path / "mine.zip"
    file.write_bytes(content)
    source = ConfiguredSource(FoundSource(file, None), hashlib.sha256(content).hexdigest(), {"max_turns": 3})
    settings = {"env": "mine@1", "sources": {"mine@1": source}, "limits": Limits()}
    async with open_client(**settings, harbor=harbor_section()) as client:
        one = await begin(client, "mine@1")
        await one.run(SOLVE)
        assert (await one.say("Done."))["reward"] == 1.0
    with pytest.raises(ConfigError) as refused:
        async with open_client(**settings):
            pass
    assert "services.env.harbor.environment" in (refused.value.hint or "")


async def test_a_service_without_containers_refuses_task_folders(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        answer = await submit(client, zipped(("", sum_task())))
    assert (answer.status_code, "services.env.harbor.environment" in answer.text) == (403, True)


def test_settings_and_rewards() -> None:
    assert read_config({"max_turns": 3}).max_turns == 3
    with pytest.raises(InputError, match="turns"):
        read_config({"turns": 3})
    assert verdict_of({"reward": 0.25, "style": 3}, "").reward == 0.25
    assert verdict_of({"a": 1, "b": 0}, "").reward == 0.5
    assert verdict_of({"a": 1}, "late").why == "late"
    assert verdict_of({"reward": 1, "bytes": 3e9, "digits": 10**400}, "").rewards == {"reward": 1.0, "bytes": 3e9}
    late = verdict_of({}, "late")
    assert (late.reward, late.unjudged) == (0.0, False)
    for nothing in (
        verdict_of({}, ""),
        verdict_of({}, "killed", unjudged=True),
        verdict_of({"reward": 1e300}, ""),
        verdict_of({"a": 10**400}, ""),
    ):
        assert nothing.unjudged
        assert nothing.why
