"""Hostile programs: none gets out, each ends or answers, and a neighbour goes on answering."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from packages.sandbox.tests.sandbox.hostile import PRELUDE, SCRIPTS, Script
from shared.errors import SandboxFailed
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "open sesame"
LIMITS = SandboxLimits(cpu_s=3, memory_mb=384, threads=24, file_mb=16, disk_mb=32, log_bytes=2**12)
NEIGHBOUR = """
class Quiet:
    splits = {"train": 3, "eval": 3}
    def reset(self, split, index, seed):
        open("mine.txt", "w").write("open sesame")
        return "hello"
    def step(self, text):
        return text, 1.0, True, False, {}
"""


@dataclass(frozen=True)
class Target:
    """What there is to attack outside the sandbox."""

    folder: Path
    port: int

    @property
    def secret(self) -> Path:
        return self.folder / "secret.txt"

    def is_whole(self) -> bool:
        return self.secret.read_text(encoding="utf-8") == SECRET and {path.name for path in self.folder.iterdir()} == {
            "secret.txt",
            "socket",
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("target")
    os.chmod(folder, 0o777)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(folder / "socket"))
        local.listen()
        found = Target(folder, server.getsockname()[1])
        found.secret.write_text(SECRET, encoding="utf-8")
        os.chmod(found.secret, 0o666)
        os.environ["VOLLEY_TEST_SECRET"] = SECRET
        yield found
        del os.environ["VOLLEY_TEST_SECRET"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def neighbour(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    sandbox = await sandboxes.start(EnvironmentProgram(NEIGHBOUR))
    yield sandbox
    await sandbox.close()


async def assert_well(sandbox: Sandbox) -> None:
    opened = answers.read_opening(await sandbox.call("reset", {"split": "eval", "index": 1, "seed": 0}, 30))
    assert opened.messages == ({"role": "user", "content": "hello"},)
    said = {"message": {"role": "assistant", "content": "bye"}}
    assert answers.read_step(await sandbox.call("step", said, 30)).reward == 1.0


def aimed(script: Script, target: Target, neighbour: Sandbox) -> str:
    words = {
        "@SECRET@": str(target.secret),
        "@FOLDER@": str(target.folder),
        "@UNIX@": str(target.folder / "socket"),
        "@PORT@": str(target.port),
        "@SERVICE@": str(os.getpid()),
        "@NEIGHBOUR@": str(neighbour.pid),
        "@OTHER@": str(neighbour.tmp),
        "@REPOSITORY@": str(Path(__file__).parents[4]),
    }
    code = PRELUDE + script.code
    for word, value in words.items():
        code = code.replace(word, value)
    return code


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("sandboxes", ["namespaces"], indirect=True)
async def test_held(script: Script, sandboxes: Sandboxes, neighbour: Sandbox, target: Target):
    await assert_held(script, sandboxes, neighbour, target)


def sampled(one_of: int) -> list[Any]:
    """Every `one_of`-th script, and at length the others."""
    return [
        pytest.param(script, id=script.name, marks=[] if n % one_of == 0 else pytest.mark.long)
        for n, script in enumerate(SCRIPTS)
    ]


@pytest.mark.parametrize("script", sampled(5))
@pytest.mark.parametrize("sandboxes", ["landlock", "oldest-landlock"], indirect=True)
async def test_held_without_namespaces(script: Script, sandboxes: Sandboxes, neighbour: Sandbox, target: Target):
    await assert_held(script, sandboxes, neighbour, target)


async def assert_held(script: Script, sandboxes: Sandboxes, neighbour: Sandbox, target: Target) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), LIMITS)
    request = {"source": aimed(script, target, neighbour), "stdin": "", "max_output": 50_000}
    deadline_s, why = (1 if "time" in script.why else 60), None
    try:
        result = answers.read_script(await sandbox.call("run", request, deadline_s))
        said = result.stdout + result.stderr
    except SandboxFailed as failed:
        said, why = failed.detail, failed.why
    finally:
        log = sandbox.log
        await sandbox.close()
    assert why in script.why or (why is None and not script.must_end), said
    for text in (said, log):
        assert "ESCAPED" not in text
        assert SECRET not in text
    assert target.is_whole()
    await assert_well(neighbour)
    assert neighbour.alive


async def test_nothing_is_left_of_them(sandboxes: Sandboxes, neighbour: Sandbox):
    assert neighbour.spawner.n_children == 1
    await assert_well(neighbour)
