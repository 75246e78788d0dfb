"""Programs of a model in containers: ends, attacks, and containers that are gone, with an engine that only makes pid
namespaces.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.env.episode_types import assistant
from shared.errors import RateLimited, SandboxFailed, SandboxLost, Unavailable
from shared.services_schema import ContainerSandbox
from volley_environments.code.environment import Code, CodeConfig
from volley_sandbox.bridges.harbor import engines
from volley_sandbox.bridges.harbor.engines import Owner, owner_in
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.process import containers
from volley_sandbox.sandbox.process.containers import ContainerSettings
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.python import PythonSession
from volley_sandbox.tools.settings import PythonSettings
from volley_sandbox.tools.toolset import Toolbox

ENGINE = Path(__file__).with_name("engine.py")
LIMITS = SandboxLimits(cpu_s=1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the engine, and its command. Skips where users cannot make pid namespaces."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("users may not make pid namespaces here")
    made = tmp_path_factory.mktemp("engine")
    (made / "kept").mkdir()
    (made / "engine").write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} {made}/kept "$@"\n', encoding="utf-8")
    (made / "engine").chmod(0o755)
    return made


def opened(folder: Path, **changes: Any) -> Sandboxes:
    section = ContainerSandbox(**{"kind": "container", "image": "python", "engine": str(folder / "engine"), **changes})
    return Sandboxes(containers=ContainerSettings(section, "tested", folder))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandboxes(folder: Path) -> AsyncIterator[Sandboxes]:
    async with opened(folder) as made:
        yield made
    assert not running(folder)


def running(folder: Path) -> list[str]:
    """Names of the engine's containers."""
    return sorted(path.name for path in (folder / "kept").iterdir())


def engine(folder: Path, *arguments: str) -> None:
    subprocess.run([folder / "engine", *arguments], check=True, timeout=30)


async def run(sandbox: Sandbox, source: str, deadline_s: float = 20) -> answers.ScriptResult:
    return answers.read_script(
        await sandbox.call("run", {"source": source, "stdin": "", "max_output": 4000}, deadline_s)
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os; os._exit(137)", "crash"),
        ("import os; os.kill(os.getpid(), 9)", "memory"),
        pytest.param(
            "import os, signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass", "cpu", marks=pytest.mark.long
        ),
        ("import time; time.sleep(60)", "time"),
        ("import os, time; os.close(3); time.sleep(60)", "crash"),
        ("import os; os.write(3, bytes(99))", "protocol"),
        ("import os, time\nif os.fork() == 0: time.sleep(60)\nos._exit(0)", "crash"),
        ("while True: print('x' * 10**6, file=__import__('sys').__stdout__)", "output"),
    ],
)
async def test_ends_of_programs(sandboxes: Sandboxes, source: str, why: str) -> None:
    """No program ends like a container that is gone, which would spare it its reward."""
    sandbox = await sandboxes.start(ScriptProgram(), LIMITS)
    with pytest.raises(SandboxFailed) as failed:
        await run(sandbox, source, 0.5 if why == "time" else 20)
    await sandbox.close()
    assert (type(failed.value), failed.value.why) == (SandboxFailed, why)


async def test_a_program_cannot_harm_the_first_process(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), LIMITS)
    tries = """
import os, resource, signal
resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS):
    try:
        print("limited", resource.prlimit(1, limit, (0, 0)))
    except PermissionError:
        pass
for number in (1, 2, 9, 15, 17, 19):
    os.kill(1, number)
for path in ("mem", "environ", "fd/1", "fd/0"):
    try:
        print("opened", open(f"/proc/{os.getppid()}/{path}"))
    except OSError:
        pass
print("tried")
"""
    assert (await run(sandbox, tries)).stdout == "tried\n"
    assert (await run(sandbox, "import sys; print('host' in sys.modules, 'container' in sys.modules)")).exit == 0
    await sandbox.close()


async def test_programs_get_no_user_namespace_and_no_keys(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), LIMITS)
    tries = """
import ctypes, errno, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
tried = (
    lambda: libc.unshare(0x10000000),
    lambda: libc.syscall(56, 0x10000011, 0, 0, 0, 0),
    lambda: libc.syscall(248, b"user", b"name", b"value", 5, -4),
    lambda: libc.syscall(250, 0, -4, 1),
    lambda: libc.syscall(435, None, 0),
)
print(*(errno.errorcode[ctypes.get_errno()] if one() == -1 else "did" for one in tried))
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
print(subprocess.check_output(["echo", "program"], text=True))
"""
    if os.uname().machine == "x86_64":
        found = await run(sandbox, tries)
        assert found.stdout.split() == ["EPERM"] * 4 + ["ENOSYS", "thread", "program"], found
    await sandbox.close()


async def test_containers_have_limits_labels_and_no_network(sandboxes: Sandboxes, folder: Path) -> None:
    sandbox = await sandboxes.start(ScriptProgram(), SandboxLimits(memory_mb=300, disk_mb=20, threads=9))
    (name,) = running(folder)
    given = (folder / "kept" / name).read_text(encoding="utf-8").split("\n")
    await sandbox.close()
    wanted = {"--network=none", "--read-only", "--cap-drop=ALL", "--memory=320m", "--memory-swap=320m", "--rm"}
    assert {*given} >= {
        *wanted,
        "--label=volley.run=tested",
        f"--label=volley.owner={owner_in(folder).name}",
        "--pids-limit=12",
    }
    assert not any(one.startswith(("--volume", "--mount", "-v")) for one in given)


async def test_a_container_that_is_gone_gives_no_reward(sandboxes: Sandboxes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "f", "tests": ["assert f() == 1"]}\n', encoding="utf-8")
    code = Code(CodeConfig(train=tmp_path / "rows.jsonl"), Toolbox(sandboxes, None, None))  # type: ignore[arg-type]
    sleeps = assistant("```python\nimport time\ntime.sleep(60)\ndef f(): return 1\n```")
    step = asyncio.ensure_future(code.reset("train", 0, 0).step(sleeps))
    tool = PythonSession(PythonSettings(), sandboxes, 0)
    call = asyncio.ensure_future(tool.call("python", {"code": "import time; time.sleep(60)"}, 60))
    async with asyncio.timeout(120):
        while len(running(folder)) < 3:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(engine, folder, "rm", "--force", *running(folder))
    for asked in (step, call):
        with pytest.raises((SandboxLost, Unavailable)):  # Unavailable: it was starting
            await asked
    assert await tool.call("python", {"code": "1 + 1"}, 20) == "2"
    await tool.close()
    right = assistant("```python\ndef f(): return 1\n```")
    assert (await code.reset("train", 0, 0).step(right)).reward == 1.0


async def test_a_container_that_is_too_old_gives_no_reward(folder: Path) -> None:
    async with opened(folder, max_lifetime_s=0.2) as short:
        sandbox = await short.start(ScriptProgram(), LIMITS)
        with pytest.raises(SandboxLost, match="max_lifetime_s"):
            await run(sandbox, "import time; time.sleep(60)")
        await sandbox.close()


@pytest.mark.parametrize("source", ["import os; os._exit(0)", "import time; time.sleep(60)"])
async def test_an_engine_that_fails_gives_no_reward(folder: Path, source: str) -> None:
    """Its command then ends with 1, as programs do."""
    async with opened(folder, image="torn") as torn:
        sandbox = await torn.start(ScriptProgram(), LIMITS)
        call = asyncio.ensure_future(run(sandbox, source))
        await asyncio.sleep(0.1)
        for name in running(folder):
            await asyncio.to_thread(engine, folder, "rm", "--force", name)
        with pytest.raises(SandboxLost):
            await call
        await sandbox.close()


async def test_a_sandbox_that_cannot_be_confined_does_not_start(sandboxes: Sandboxes) -> None:
    with pytest.raises(Unavailable, match="did not start"):
        await sandboxes.start(ScriptProgram(), SandboxLimits(file_mb=2**60))


async def test_containers_are_kept_ready(folder: Path) -> None:
    async with opened(folder, warm=1) as warm:
        first = await warm.start(ScriptProgram(), LIMITS)
        async with asyncio.timeout(120):
            while len(names := running(folder)) < 2:
                await asyncio.sleep(0.02)
        second = await warm.start(ScriptProgram(), LIMITS)
        assert (await run(second, "print(1)")).stdout == "1\n"
        assert {*names} <= {*running(folder)}
        await first.close()
        await second.close()
    assert not running(folder)


async def test_starts_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder, max_starting=1) as bounded:
        monkeypatch.setattr(containers, "WAIT_S", 0.01)
        found = await asyncio.gather(
            *(bounded.start(ScriptProgram(), LIMITS) for _ in range(3)), return_exceptions=True
        )
        assert [type(one) for one in found] == [Sandbox, RateLimited, RateLimited]
        await (await bounded.start(ScriptProgram(), LIMITS)).close()


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("absent", "the image absent of the sandboxes: "),
        ("absent", "pull access denied for absent"),
        ("broken", '"python3": executable file not found'),
    ],
)
async def test_an_image_that_cannot_be_used_is_named(folder: Path, image: str, told: str) -> None:
    with pytest.raises(Unavailable) as refused:
        async with opened(folder, image=image):
            pass
    assert told in refused.value.detail


async def test_an_engine_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no-such-engine ps cannot be started"):
        async with opened(tmp_path, engine="no-such-engine"):
            pass


HIDE_AND_ASK = """
import os, subprocess, engines
os.unshare(os.CLONE_NEWNS)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
others = [engines.has_ended(pid, "5") for pid in (1, 2**22, os.getpid())]
print(repr(engines.started_at(1)), *others)
"""
PRINT_OWNER = "import pathlib, sys, engines; print(engines.owner_in(pathlib.Path(sys.argv[1])).name)"


def owner_elsewhere(folder: Path) -> str:
    """Owner whose process has ended, in a pid namespace of its own, as in a container with the machine's network."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command += [sys.executable, "-c", PRINT_OWNER, str(folder)]
    return subprocess.run(
        command, cwd=Path(engines.__file__).parent, capture_output=True, encoding="utf-8", check=True
    ).stdout.strip()


async def test_an_owner_removes_only_what_has_surely_ended(folder: Path, tmp_path: Path) -> None:
    mine = owner_in(tmp_path / "one")
    other = owner_elsewhere(tmp_path / "other")
    assert not mine.may_remove(other)  # nobody sees its processes from here
    assert owner_in(tmp_path / "other").may_remove(other)  # nobody else can have its folder now
    held = owner_elsewhere(tmp_path / "one")  # a second service in a folder that is taken
    assert not mine.may_remove(held)
    assert mine.may_remove(mine.name)
    assert mine.may_remove(mine.name.replace(f"-{os.getpid()}-", "-1-"))  # of this namespace, with another start
    assert not any(map(mine.may_remove, ("", "redis", "volley-000000-1-2", other.replace("volley-", "volley-0"))))
    assert not Owner(mine.name, mine.place, alone=False).may_remove(other.replace(other[13:19], mine.place))


async def test_what_a_killed_service_left_is_removed(folder: Path) -> None:
    sleeper = await asyncio.create_subprocess_exec("sleep", "600")
    gone = owner_in(folder).name.replace(str(os.getpid()), str(sleeper.pid))  # a process with another start
    other = "volley-000000000000-1-2"  # of another machine
    for name in (left := f"{gone}-0123456789ab", kept := f"{other}-0123456789ab"):
        (folder / "kept" / name).write_text(str(sleeper.pid), encoding="utf-8")
    async with opened(folder):
        assert left not in running(folder)
        assert kept in running(folder)
    assert await sleeper.wait() == -9
    (folder / "kept" / kept).unlink()


def asked_of_hidden_processes() -> subprocess.CompletedProcess[str]:
    kept = {**os.environ, "PYTHONPATH": str(Path(engines.__file__).parent)}
    command = [sys.executable, "-c", HIDE_AND_ASK]
    return subprocess.run(command, env=kept, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can hide processes")
async def test_a_process_that_another_user_hides_has_not_ended() -> None:
    done = asked_of_hidden_processes()
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mounts here: {done.stderr[-200:]}")
    assert done.stdout.split() == ["''", "False", "True", "True"]


@pytest.mark.parametrize(
    "shown",
    [
        "com.docker.compose.project.working_dir=/x,com.docker.compose.project=a-1__env,volley.episode=7",  # Docker
        "map[com.docker.compose.project:a-1__env com.docker.compose.project.working_dir:/x volley.episode:7]",  # Podman
    ],
)
def test_labels_are_read_as_each_engine_shows_them(shown: str) -> None:
    assert engines.label_of(shown, "com.docker.compose.project") == "a-1__env"
    assert engines.label_of(shown, "volley.episode") == "7"
    assert engines.label_of(shown, "volley.owner") == engines.label_of("", "volley.owner") == ""
