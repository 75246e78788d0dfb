"""Programs of a model in real containers: Docker Engine or Podman, and the image python:3.13-slim."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.env.episode_types import assistant
from shared.errors import SandboxFailed, SandboxLost, Unavailable
from shared.services_schema import ContainerSandbox
from tests.support.docker import IMAGE, engine, why_no_engine
from volley.layout import PROJECT
from volley_environments.code.environment import Code, CodeConfig
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.process.containers import ContainerSettings
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.python import PythonSession
from volley_sandbox.tools.settings import PythonSettings
from volley_sandbox.tools.toolset import Toolbox
from volley_sandbox.tools.workspace import Workspace

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
RUN = "tested-sandbox"


@pytest.fixture(autouse=True, scope="module", params=["docker", "podman"])
def command(request: pytest.FixtureRequest) -> str:
    """Command of the engine. Skips the tests of one that starts no containers here."""
    if why := why_no_engine(request.param):
        pytest.skip(why)
    return request.param


def settings(command: str, folder: Path, image: str = IMAGE) -> ContainerSettings:
    return ContainerSettings(ContainerSandbox(kind="container", engine=command, image=image), RUN, folder)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandboxes(command: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxes]:
    async with Sandboxes(containers=settings(command, tmp_path_factory.mktemp("service"))) as opened:
        yield opened
    assert await containers(command, 0) == []


async def containers(command: str, n: int) -> list[str]:
    """The run's containers, as soon as there are `n`."""
    listing = ("ps", "--all", "--quiet", "--filter", f"label=volley.run={RUN}")
    async with asyncio.timeout(30):
        while len(found := (await asyncio.to_thread(engine, command, *listing)).stdout.split()) != n:
            await asyncio.sleep(0.2)
    return found


async def run(sandbox: Sandbox, source: str) -> answers.ScriptResult:
    return answers.read_script(await sandbox.call("run", {"source": source, "stdin": "", "max_output": 9999}, 60))


def toolbox(sandboxes: Sandboxes) -> Toolbox:
    return Toolbox(sandboxes, None, None)  # type: ignore[arg-type]


async def test_answers_are_graded(sandboxes: Sandboxes, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "f", "tests": ["assert f(3) == 9", {"input": "3", "output": "9"}]}\n', "utf-8")
    code = Code(CodeConfig(train=rows), toolbox(sandboxes))
    for program, verdict in (
        ("def f(x): return x * x\nif __name__ == '__main__': print(f(int(input())))", "passed"),
        ("def f(x): return x\nif __name__ == '__main__': print(f(int(input())))", "wrong"),
        ("print(9)\ndef f(x):\n    while True: pass", "time"),
        ("print(9)\nheld = b'x' * (2 << 30)", "memory"),
        ("import os\nos._exit(137)", "crash"),
    ):
        result = await code.reset("train", 0, 0).step(assistant(f"```python\n{program}\n```"))
        assert result.info.extra["verdict"] == verdict, (program, result.info)


async def test_the_tool_keeps_variables_files_and_starts_programs(sandboxes: Sandboxes) -> None:
    files = Workspace(9, 10**5, {"a.txt": b"one"})
    tool = PythonSession(PythonSettings(), sandboxes, 0, files)
    assert await tool.call("python", {"code": "x = open('a.txt').read(); open('b.txt', 'w').write(x * 2)"}, 20)
    assert await tool.call("python", {"code": "import subprocess as s; s.getoutput('cat b.txt'), x"}, 20) == (
        "('oneone', 'one')"
    )
    assert files.content["b.txt"] == b"oneone"
    await tool.close()


async def test_a_container_has_nothing_of_the_machine(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), SandboxLimits(disk_mb=8, threads=8))
    found = await run(
        sandbox,
        """
import os, socket
print(os.listdir("/sys/class/net"), os.getuid(), os.access("/usr", os.W_OK), os.listdir("/tmp"))
for attempt in (
    lambda: socket.create_connection(("1.1.1.1", 53), timeout=2),
    lambda: open("/tmp/large", "wb").write(bytes(9 << 20)),
    lambda: open("/usr/x", "w"),
    lambda: os.setuid(0),
):
    try:
        print("did", attempt())
    except OSError as error:
        print("refused", error.errno)
""",
    )
    await sandbox.close()
    assert found.stdout.split("\n")[0] == "['lo'] 65534 False []"
    assert found.stdout.split("\n")[1:5] == ["refused 101", "refused 28", "refused 30", "refused 1"], found


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


async def test_many_processes_do_no_harm(command: str, sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), SandboxLimits(threads=8))
    with pytest.raises(SandboxFailed) as failed:
        await sandbox.call("run", {"source": BOMB, "stdin": "", "max_output": 99}, 2)
    await sandbox.close()
    assert type(failed.value) is SandboxFailed
    assert await containers(command, 0) == []


async def test_a_container_that_is_removed_gives_no_reward(command: str, sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(ScriptProgram())
    call = asyncio.ensure_future(run(sandbox, "import time; time.sleep(60)"))
    await asyncio.to_thread(engine, command, "rm", "--force", *(await containers(command, 1)))
    with pytest.raises(SandboxLost):
        await call
    await sandbox.close()


async def test_an_image_that_does_not_exist_is_named(command: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=rf"{command} pull: .*absent\.invalid"):
        async with Sandboxes(containers=settings(command, tmp_path, "absent.invalid/image:1")):
            pass


SERVICE = f"""
import asyncio, pathlib, sys
from volley_sandbox.sandbox.limits import ScriptProgram
from volley_sandbox.sandbox.process.containers import ContainerSettings
from volley_sandbox.sandbox.sandboxes import Sandboxes
from shared.services_schema import ContainerSandbox

async def main():
    folder = pathlib.Path(sys.argv[1])
    section = ContainerSandbox(kind="container", engine=sys.argv[2], image="{IMAGE}")
    settings = ContainerSettings(section, "{RUN}", folder)
    async with Sandboxes(containers=settings) as sandboxes:
        sandbox = await sandboxes.start(ScriptProgram())
        await sandbox.call("run", {{"source": "while True: pass", "stdin": "", "max_output": 9}}, 60)

asyncio.run(main())
"""


async def test_a_killed_service_leaves_no_container(command: str, tmp_path: Path) -> None:
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE, tmp_path, command, cwd=PROJECT)
    assert await containers(command, 1)
    service.kill()
    await service.wait()
    assert await containers(command, 0) == []
