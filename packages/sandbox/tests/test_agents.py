"""Agents: programs that are started for each episode, reach only the model, and are judged afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from packages.sandbox.tests.agents import ASKS, HEADER, RUNS, Recorder, adds, begin, ended, finish, start
from services.env.backend import ModelAddress, ProgramState
from services.env.episode_types import StepResult
from shared.errors import Forbidden
from shared.process.ports import free_port
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.sandboxes import why_no_programs
from tests.support.submitted import decided, submit
from volley.layout import PROJECT
from volley_python.submissions.packing import packed_file
from volley_sandbox.agents.backend import AgentBackend, reason_in
from volley_sandbox.sandbox.answers import AgentSpec
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.sandboxes import Sandboxes

CALLS_A_MODULE = '    command = ["python", "-m", "program"]\n'


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def why_not() -> str:
    return await why_no_programs()


@pytest_asyncio.fixture
async def client(open_client: OpenClient, why_not: str) -> AsyncIterator[httpx.AsyncClient]:
    if why_not:
        pytest.skip(why_not)
    async with open_client(limits=Limits()) as opened:
        yield opened


@pytest_asyncio.fixture
async def sandboxes(why_not: str) -> AsyncIterator[Sandboxes]:
    if why_not:
        pytest.skip(why_not)
    async with Sandboxes() as opened:
        yield opened


type Play = Callable[..., Awaitable[tuple[ProgramState, StepResult | None]]]


@pytest.fixture
def play(sandboxes: Sandboxes) -> Play:
    """Play an episode without a service: its source, the address of the model, and a key. Not judged if it fails."""

    async def played(
        source: str, base_url: str, key: str, timeout_s: float = 60.0
    ) -> tuple[ProgramState, StepResult | None]:
        async def program() -> EnvironmentProgram:
            return EnvironmentProgram(source)

        limits = replace(SandboxLimits(), memory_mb=256)
        spec = AgentSpec(kind="program", timeout_s=timeout_s, exit_codes=(0,), judged=True)
        backend = AgentBackend("adder", program, {"train": 100}, True, sandboxes, limits, 20.0, deque(), agent=spec)
        episode = await backend.reset("train", 3, 0)
        try:
            episode.begin("run", ModelAddress(base_url, key, "policy"))
            await episode.play()
            state = await episode.state(0.0)
            return state, None if state.state == "failed" else await episode.finish()
        finally:
            await episode.close()

    return played


async def taken(client: httpx.AsyncClient, source: str) -> None:
    answer = await submit(client, source, name="adder")
    assert answer.status_code == 202, answer.text
    row = await decided(client, "adder")
    assert row["state"] == "active", (row["why"], row["report"])


async def test_a_program_reaches_the_model_and_is_judged(client: httpx.AsyncClient) -> None:
    await taken(client, ASKS)
    recorder = Recorder(adds)
    async with recorder.serve() as base_url:
        made = await begin(client)
        assert made["messages"] == [{"role": "user", "content": "6+7="}]
        assert (made["info"]["agent"], made["info"]["timeout_s"], made["info"]["judged"]) == ("program", 20.0, True)
        one = made["episode_id"]
        assert (await client.get(f"/episodes/{one}/run")).status_code == 409
        for _ in range(2):
            began = await start(client, one, base_url)
            assert (began.status_code, began.json()["state"]) == (202, "running")
        assert (await start(client, one, base_url.replace("127.0.0.1", "127.0.0.2"))).status_code == 409
        state = await ended(client, one)
        assert (state["state"], state["exit_code"]) == ("exited", 0), state
        last = (await finish(client, one)).json()
    assert (last["reward"], last["terminated"], last["truncated"]) == (1.0, True, False)
    assert (last["info"]["success"], last["info"]["files"]) == (True, ["numbers.txt"])
    ((path, headers, body),) = [row for row in recorder.requests if row[0] == "chat/completions"]
    assert (path, headers["authorization"]) == ("chat/completions", "Bearer sess-1")
    assert headers["idempotency-key"]
    assert body["messages"][-1]["content"] == "6+7="


async def test_the_program_of_a_file_finds_the_modules_beside_it(client: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(HEADER, encoding="utf-8")
    program = "from asking import *\nprint(ask(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], '6+7='))"
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    source = "import os, sys\nfrom asking import ask\n" + ASKS.removeprefix(HEADER)
    for name, text in (
        ("function", source),
        ("command", source.replace("def run(", "def unused(").replace("    timeout", CALLS_A_MODULE + "    timeout")),
    ):
        (file := tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        content = packed_file(file)
        posted = {"params": {"name": name}, "headers": {"Content-Type": "application/zip"}}
        assert (await client.post("/environments", content=content, **posted)).status_code == 202
        row = await decided(client, name)
        assert row["state"] == "active", row["report"]
        async with Recorder(adds).serve() as base_url:
            one = (await begin(client, name))["episode_id"]
            await start(client, one, base_url)
            assert (await ended(client, one))["exit_code"] == 0
            assert (await finish(client, one)).json()["reward"] == 1.0


@pytest.mark.parametrize(
    ("run", "state", "code", "told"),
    [
        ("raise KeyError('lost')", "failed", 1, "it ended with exit code 1: KeyError: 'lost'"),
        ("print('no key'); sys.exit(3)", "failed", 3, "it ended with exit code 3: no key"),
        ("os.kill(os.getpid(), 9)", "failed", 137, "it ended with exit code 137: it printed nothing"),
        ("x = 'x' * (5 * 10**8); time.sleep(60)", "failed", None, "sandbox_memory_mb"),
        ("subprocess.Popen(['sleep', '60']); return '13'", "exited", 0, ""),
    ],
)
async def test_ends_of_programs(play: Play, run: str, state: str, code: int | None, told: str) -> None:
    found, judged = await play(RUNS % run, "http://127.0.0.1:9/v1", "sess-1")
    assert (found.state, found.exit_code) == (state, code), found
    assert told in found.detail
    assert "\n" not in found.detail
    assert judged is None or judged.reward == float("13" in run)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "asked\nTraceback (most recent call last):\n  File 'a.py'\n    x\n    ^\nValueError: 2 errors\n  one",
            "ValueError: 2 errors",
        ),
        (
            "Traceback (most recent call last):\n  a\nKeyError: 1\nTraceback (most recent call last):\n  b\nOSError\n",
            "OSError",
        ),
        ("killed\n\n", "killed"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_the_reason_of_a_failure_is_one_line_of_the_output(output: str, reason: str) -> None:
    assert reason_in(output) == reason


async def test_a_program_without_end_is_ended_and_judged(play: Play) -> None:
    found, judged = await play(RUNS % "time.sleep(60)", "http://127.0.0.1:9/v1", "sess-1", timeout_s=0.5)
    assert (found.state, found.exit_code, judged and judged.reward) == ("exited", None, 0.0), found
    assert "after 0.5 s" in found.detail


@pytest.mark.parametrize("taken", ["", ", task", ", model, **more", ", *, limit=3"])
async def test_run_gets_the_arguments_that_it_takes(play: Play, taken: str) -> None:
    source = ASKS.replace(
        "def run(self, base_url, api_key, model):", f"def run(self{taken}):\n        import os\n        task = {TASK}"
    )
    source = source.replace('if api_key == "sess-1":', "if True:")
    source = source.replace(
        'ask(base_url, api_key, os.environ["VOLLEY_TASK"])', 'ask(os.environ["OPENAI_BASE_URL"], "sess-1", task)'
    )
    recorder = Recorder(adds)
    async with recorder.serve() as base_url:
        state, judged = await play(source, base_url, "sess-1")
    assert (state.state, judged and judged.reward) == ("exited", 1.0), state


TASK = "locals().get('task', os.environ['VOLLEY_TASK'])"


async def test_a_declared_exit_code_is_data(client: httpx.AsyncClient) -> None:
    command = ASKS.replace(
        "    def run(self, base_url, api_key, model):", "    def unused(self, base_url, api_key, model):"
    )
    command = command.replace("    timeout_s = 20", f"    timeout_s, exit_codes, command = 20, (0, 4), {_COMMAND!r}")
    command = command.replace("def judge(self, output):", "def judge(self, output, exit_code):")
    command = command.replace('"files": sorted', '"code": exit_code, "files": sorted')
    await taken(client, command)
    recorder = Recorder(adds)
    async with recorder.serve() as base_url:
        one = (await begin(client))["episode_id"]
        await start(client, one, base_url)
        assert (await ended(client, one))["exit_code"] == 4
        last = (await finish(client, one)).json()
    assert (last["reward"], last["info"]["code"]) == (1.0, 4)


_COMMAND = [
    "python",
    "-c",
    HEADER + "print(ask(os.environ['OPENAI_BASE_URL'], 'k', os.environ['VOLLEY_TASK'])); exit(4)",
]


async def test_a_request_outlives_a_restart_of_the_recorder(client: httpx.AsyncClient) -> None:
    await taken(client, ASKS)
    one, port = (await begin(client))["episode_id"], free_port()
    await start(client, one, f"http://127.0.0.1:{port}/v1")
    assert (await client.get(f"/episodes/{one}/run?wait_s=1")).json()["state"] == "running"
    recorder = Recorder(adds)
    async with recorder.serve(port):
        assert (await ended(client, one))["state"] == "exited"
    assert (await finish(client, one)).json()["reward"] == 1.0
    assert len(recorder.requests) == 1


async def test_only_routes_of_the_model_leave(play: Play) -> None:
    ask = """
            import http.client
            found = []
            for path in ("sessions", "sessions/x/reward", "../status", "%2e%2e/a", "./sessions"):
                door = http.client.HTTPConnection("127.0.0.1", 4010)
                door.request("POST", "/v1/" + path, b"{}")
                found.append(door.getresponse().status)
            return found"""
    recorder = Recorder(adds)
    async with recorder.serve() as base_url:
        state, _ = await play(RUNS % ask.strip(), base_url, "sess-1")
    assert state.state == "exited", state
    assert not recorder.requests


async def test_the_program_s_own_idempotency_key_is_kept(play: Play) -> None:
    ask = """
            import http.client
            door = http.client.HTTPConnection("127.0.0.1", 4010)
            body, headers = b'{"messages": [{"content": "1"}]}', {"idempotency-key": "mine"}
            door.request("POST", "/v1/chat/completions", body, headers)
            return door.getresponse().status"""
    recorder = Recorder(lambda text: text)
    async with recorder.serve() as base_url:
        await play(RUNS % ask.strip(), base_url, "sess-1")
    ((_, headers, _),) = recorder.requests
    assert headers["idempotency-key"] == "mine"


async def test_nothing_else_can_be_reached(play: Play) -> None:
    reach = """
            import socket
            found = []
            for host, port in (("127.0.0.1", PORT), ("127.0.0.2", PORT), ("1.1.1.1", 53), ("::1", PORT)):
                try:
                    socket.create_connection((host, port), timeout=1)
                    found.append(host)
                except OSError:
                    pass
            for family, kind in ((2, socket.SOCK_DGRAM), (2, socket.SOCK_RAW), (16, 3), (40, 1)):
                try:
                    socket.socket(family, kind)
                    found.append(family)
                except OSError:
                    pass
            print(found)"""
    async with Recorder(adds).serve() as base_url:
        port = base_url.rpartition(":")[2].partition("/")[0]
        state, _ = await play(RUNS % reach.strip().replace("PORT", port), base_url, "sess-1")
    assert state.output == "[]", state


@pytest.mark.parametrize(
    "attack",
    [
        "kept = [socket.create_connection(('127.0.0.1', 4010)) for _ in range(200)]",
        "[subprocess.Popen(['sleep', '60']) for _ in range(1000)]",
        "[print('x' * 10**6) for _ in range(50)]",
        "os.write(3, b'{}' * 100)",
        "open('/tmp/large', 'wb').write(bytes(2 * 10**8))",
        "[os.kill(pid, 9) for pid in (1, -1)]",
        "ask(base_url, api_key, 'x' * 9 * 2**20)",
    ],
)
async def test_attacks_leave_other_episodes_alone(play: Play, attack: str) -> None:
    source = RUNS % f"import socket\n            {attack}"
    async with Recorder(adds).serve() as base_url:
        assert (await play(source, base_url, "sess-1"))[0].state in ("exited", "failed")
        state, judged = await play(source, base_url, "sess-2")
    assert (state.state, judged and judged.reward) == ("exited", 1.0)


async def test_finish_ends_a_program(client: httpx.AsyncClient) -> None:
    await taken(client, RUNS % "time.sleep(60)")
    one = (await begin(client))["episode_id"]
    await start(client, one, "http://127.0.0.1:9/v1")
    assert (await client.get(f"/episodes/{one}/run?wait_s=0.5")).json()["state"] == "running"
    last = await finish(client, one)
    assert (last.status_code, last.json()["reward"]) == (200, 0.0)
    assert (await finish(client, one)).json() == last.json()
    assert (await start(client, one, "http://127.0.0.1:9/v1")).status_code == 409


async def test_a_deleted_episode_ends_its_program(client: httpx.AsyncClient) -> None:
    word = new_word()
    await taken(client, RUNS % f"os.execvp('sleep', ['sleep', '{word}'])")
    one = (await begin(client))["episode_id"]
    await start(client, one, "http://127.0.0.1:9/v1")
    async with asyncio.timeout(60):
        while not running(word):
            await asyncio.sleep(0.05)
    assert (await client.delete(f"/episodes/{one}")).status_code == 204
    async with asyncio.timeout(60):
        while running(word):
            await asyncio.sleep(0.05)


def new_word() -> str:
    """Seconds to sleep that no other command of this machine has."""
    return str(10**6 + secrets.randbelow(10**9))


def running(word: str) -> list[str]:
    """Processes of this machine whose command has this word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in file.read_text("utf-8").split("\0"):
                found.append(file.parent.name)
    return found


EXTERNAL = ASKS.replace("    timeout_s", '    agent = "external"\n    timeout_s')


async def test_an_agent_outside_sends_its_output(client: httpx.AsyncClient) -> None:
    await taken(client, EXTERNAL)
    made = await begin(client)
    assert (made["info"]["agent"], made["info"]["judged"]) == ("external", True)
    one = made["episode_id"]
    assert (await start(client, one, "http://127.0.0.1:9/v1")).status_code == 409
    assert (await client.get(f"/episodes/{one}/run")).json()["state"] == "running"
    last = await finish(client, one, output="13")
    assert last.json()["reward"] == 1.0, last.text
    assert (await finish(client, one, output="14")).status_code == 409


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def judge", "def unjudged", "no method judge"),
        ("    timeout_s = 20", "    timeout_s, command = 20, ['a']", "either command or run"),
        ("run(self, base_url, api_key, model)", "run(self, question)", "Adder.run takes question; it may take"),
        ("    timeout_s = 20", "    timeout_s, exit_codes = 20, [256]", "exit_codes"),
        ("timeout_s = 20", "timeout_s = -1", "timeout_s"),
        ("timeout_s = 20", "timeout_s, agent = 20, 'robot'", "agent"),
        ("return ask(", "return 5, (", "never called the model"),
        ("return float(right), ", "return 'much', ", "reward"),
        ("str(self.a + self.b)}]", "'5'}]", "judge says the opposite"),
    ],
)
async def test_wrong_agents_are_refused_by_name(client: httpx.AsyncClient, old: str, new: str, told: str) -> None:
    assert old in ASKS
    await submit(client, ASKS.replace(old, new), name="adder")
    row = await decided(client, "adder")
    assert row["state"] == "rejected"
    assert told in str(row["report"]["checks"][-1])


async def test_a_killed_service_leaves_no_program(sandboxes: Sandboxes) -> None:
    word = new_word()
    source = RUNS % f"os.execvp('sleep', ['sleep', '{word}'])"
    program = f"""
import asyncio
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.sandboxes import Sandboxes

async def main():
    async with Sandboxes() as sandboxes:
        one = await sandboxes.start(EnvironmentProgram({source!r}, kind="agent"), SandboxLimits(open_files=256))
        await one.call("reset", {{"split": "train", "index": 0, "seed": 0}}, 10)
        asked = dict(base_url="", api_key="sess-1", model="m", timeout_s=60, memory_mb=256, max_output=99)
        await one.call("program", asked, 60)

asyncio.run(main())
"""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=PROJECT)
    async with asyncio.timeout(60):
        while not running(word):
            await asyncio.sleep(0.05)
        service.kill()
        await service.wait()
        while running(word):
            await asyncio.sleep(0.05)


async def test_a_machine_without_namespaces_refuses_programs() -> None:
    async with Sandboxes(namespaces=False) as sandboxes:
        with pytest.raises(Forbidden) as refused:
            await sandboxes.start(EnvironmentProgram(ASKS, kind="agent"))
    assert "root" in refused.value.hint


async def test_the_program_replaces_nothing_that_the_judge_imports(play: Play) -> None:
    tries = (
        "above = lambda path: [path] + (above(os.path.dirname(path)) if path != '/' else [])\n"
        "            held = ['/usr', '/bin', '/lib', '/etc', '/dev', '/proc', *above(sys.base_prefix)[:-1]]\n"
        "            moved = []\n"
        "            for path in held:\n"
        "                try: os.rename(path, '/tmp/moved'); moved.append(path)\n"
        "                except OSError: pass\n"
        "            return f'13 {moved}'"
    )
    source = (RUNS % tries).replace('"files": sorted', '"moved": output, "files": sorted')
    source = source.replace("str(output).strip() ==", "str(output).strip() == '13 []' and '13' ==")
    found, judged = await play(source, "http://127.0.0.1:9/v1", "sess-1")
    assert found.state == "exited", found
    assert judged is not None
    assert judged.reward == 1.0, judged


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_an_ordinary_user_runs_agents(why_not: str) -> None:
    """Run these tests again as user 1000, who has no rights."""
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if why_not or subprocess.run([*user, "true"], capture_output=True, check=False).returncode:
        pytest.skip(why_not or "users may not make namespaces here")
    names = (
        "test_ends_of_programs",
        "test_a_program_without_end_is_ended_and_judged",
        "test_the_program_replaces_nothing_that_the_judge_imports",
    )
    tests = [f"{__file__}::{name}" for name in names]
    command = [*user, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "7 passed" in ran.stdout
    assert "skipped" not in ran.stdout
