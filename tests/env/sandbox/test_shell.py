"""Sandboxes that start programs: what commands can do, and what they cannot do to the system, to each other, to what
runs them.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.env.sandbox.limits import SandboxLimits, ShellProgram
from services.env.sandbox.sandbox import Sandbox
from services.env.sandbox.sandboxes import Sandboxes
from shared.errors import Forbidden, InputError, SandboxFailed

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    """Skips where sandboxes cannot start programs."""
    async with Sandboxes() as opened:
        try:
            await opened.probe_shell()
        except Forbidden as error:
            pytest.skip(error.detail)
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(60):
        opened = await sandboxes.start(ShellProgram(), SandboxLimits(threads=48))
        try:
            yield opened
        finally:
            await opened.close()


async def run(sandbox: Sandbox, text: str, **changes: Any) -> dict[str, Any]:
    asked = {"text": text, "cwd": "/tmp", "env": {}, "timeout_s": 20, "cpu_s": 20, "memory_mb": 400, "max_output": 4000}
    return await sandbox.call("command", {**asked, **changes}, 30)


async def said(sandbox: Sandbox, text: str) -> str:
    return (await run(sandbox, text))["output"]


async def test_programs_of_the_machine_run(sandbox: Sandbox) -> None:
    assert await said(sandbox, "echo b > f; (cat f; echo a) | sort; cat <(echo c); ls; cp -a f g; cat g") == (
        "a\nb\nc\nf\nb\n"
    )
    program = "import subprocess, sys; print(subprocess.check_output(['echo', 'in']).decode(), sys.version_info[0])"
    assert (await said(sandbox, f'python3 -c "{program}"')).split() == ["in", "3"]
    assert await said(sandbox, "printf 'all:\\n\\t@echo made; true\\n' > Makefile; ! type make >/dev/null || make") in (
        "made\n",
        "",
    )
    resets = "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}, resetids=True), 0); os.setuid(0)"
    assert "PermissionError" in await said(sandbox, f'python3 -c "{resets}" 2>&1 | tail -n 1')
    assert (await run(sandbox, "setsid true"))["exit"] != 0  # a session has a share of the processor of its own
    assert (await run(sandbox, "exit 3"))["exit"] == 3
    assert (await run(sandbox, "kill -9 $$"))["exit"] == 137
    assert await said(sandbox, "yes | head -n 1") == "y\n"  # which ends by SIGPIPE
    assert await said(sandbox, 'echo "$LEFT $HOME $(pwd)"') == " /root /tmp\n"


async def test_nothing_of_the_system_can_be_changed(sandbox: Sandbox) -> None:
    tries = [
        "touch /usr/x",
        "mv /usr /u",
        "mv /bin /b",
        "rm -rf /etc",
        "echo x > /etc/passwd",
        "mv /dev /d",
        "mv /root /r",
    ]
    tries += [
        "ln -sf /tmp/x /bin/bash",
        "mount -t tmpfs x /bin",
        "umount /usr",
        "mknod /tmp/n c 1 3",
        "chroot /tmp true",
    ]
    tries += ["mv $(dirname $(dirname $(command -v python3))) /p", "echo 1 > /proc/1/oom_score_adj"]
    for text in tries:
        assert (await run(sandbox, text))["exit"] != 0, text
    assert "root" not in await said(sandbox, "ls /bin/bash /etc/passwd > /dev/null && id -un")


async def test_nothing_else_can_be_reached(sandboxes: Sandboxes, sandbox: Sandbox) -> None:
    other = await sandboxes.start(ShellProgram())
    try:
        await run(other, "echo secret > /tmp/mine; chmod 777 /tmp/mine")
        assert "secret" not in await said(sandbox, "cat /tmp/mine /sandbox/mine 2>&1")
        listed = await said(sandbox, "ls -d /proc/[0-9]* | wc -l")
        assert int(listed) < 8, listed
        for text in (
            'python3 -c "import socket; socket.socket()"',
            'python3 -c "import socket; socket.socket(socket.AF_UNIX)"',
            "unshare -U true",
            "cat /proc/1/environ",
            "ls /proc/1/fd",
            "cat /proc/1/mem",
            "cat /proc/kcore /proc/sys/kernel/hostname",
            f"ls {Path.cwd()}",
            "strace -p 1 || python3 -c 'import ctypes; exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) < 0)'",
        ):
            assert (await run(sandbox, text))["exit"] != 0, text
    finally:
        await other.close()


async def test_a_command_leaves_nothing_behind_and_harms_nothing(sandbox: Sandbox) -> None:
    await run(sandbox, "nohup sleep 300 & (sleep 300 &) & disown; sleep 300 & kill -9 1; kill -STOP 1; trap '' TERM")
    assert (await said(sandbox, "ls -d /proc/[0-9]*")).split()[0] == "/proc/1"
    assert "sleep" not in await said(sandbox, "cat /proc/[0-9]*/comm")
    bomb = await run(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 0.3", max_output=200)
    assert len(bomb["output"]) < 400
    assert await said(sandbox, "echo fine") == "fine\n"


async def test_limits(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "sleep 300", timeout_s=0.2))["ended"] == "time"
    hold = "python3 -c 'x = b\"a\" * (60 << 20); import time; time.sleep(300)'"
    assert (await run(sandbox, f"{hold} & {hold} & {hold} & wait", memory_mb=120))["ended"] == "memory"
    busy = await run(sandbox, "while :; do :; done", cpu_s=1)
    assert (busy["exit"], busy["ended"]) == (137, ""), busy
    tight = await run(sandbox, "python3 -c 'bytes(300 << 20)'", memory_mb=200)
    assert "MemoryError" in tight["output"]
    full = await run(sandbox, "for i in 1 2 3 4 5 6; do head -c 15M /dev/zero > f$i || exit 1; done")
    assert full["exit"] == 1, full
    flood = await run(sandbox, "head -c 20M /dev/zero | tr '\\0' x")
    assert "bytes left out" in flood["output"]
    assert len(flood["output"]) < 5000


SHARED = """
import mmap, os
def denied(make):
    try:
        make()
    except OSError:
        return True
    return False
read = os.open("/dev/zero", os.O_RDONLY)
assert denied(lambda: mmap.mmap(-1, 1 << 20))
assert denied(lambda: mmap.mmap(read, 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ))
assert denied(lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20))
assert os.read(read, 9) == bytes(9)
mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[:5] = b"still"
with open("file", "wb+") as file:
    file.write(bytes(1 << 20))
    mmap.mmap(file.fileno(), 1 << 20)[:5] = b"still"
import multiprocessing, sqlite3
value = multiprocessing.Value("i", 3)
with value.get_lock():
    value.value += 4
sqlite3.connect("base").executescript("pragma journal_mode=wal; create table t(x); insert into t values (1)")
print("fine", value.value)
"""


async def test_no_memory_is_shared_without_a_file(sandbox: Sandbox) -> None:
    """Such memory stays when its pages are given back, and no process shows it."""
    assert await said(sandbox, f"cat > s.py <<'END'\n{SHARED}\nEND\npython3 s.py") == "fine 7\n"


FORKED = """
import os, sys, time
held = b"a" * (60 << 20)
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(float(sys.argv[2]))
        os._exit(0)
for _ in range(int(sys.argv[1])):
    os.wait()
print("fine")
"""


async def test_a_page_that_several_processes_have_counts_once(sandbox: Sandbox) -> None:
    """As far as it is had four times in all: to look at more takes longer than a command that takes all there is."""
    await run(sandbox, f"cat > f.py <<'END'\n{FORKED}\nEND")
    assert (await run(sandbox, "python3 f.py 3 0.4", memory_mb=190))["output"] == "fine\n"
    assert (await run(sandbox, "python3 f.py 14 300", memory_mb=190))["ended"] == "memory"


HELD = """
import ctypes, threading, time
def hold():
    held = b"a" * (60 << 20)
    time.sleep(300)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_memory_is_counted_where_the_first_thread_has_ended(sandbox: Sandbox) -> None:
    await run(sandbox, f"cat > held.py <<'END'\n{HELD}\nEND")
    held = await run(sandbox, "for i in 1 2 3; do python3 held.py & done; wait", memory_mb=120)
    assert held["ended"] == "memory", held


async def test_memory_is_counted_of_a_program_that_nobody_may_read(sandbox: Sandbox) -> None:
    hidden = "cp $(readlink -f $(command -v bash)) hidden; chmod 111 hidden"
    hold = "./hidden -c 'x=$(head -c 40M /dev/zero | tr \"\\0\" x); read -t 300 < <(sleep 300)'"
    held = await run(sandbox, f"{hidden}; {hold} & {hold} & {hold} & wait", memory_mb=100)
    assert held["ended"] == "memory", held


async def test_memory_is_looked_at_while_a_command_prints_without_end(sandbox: Sandbox) -> None:
    hold = "python3 -c 'x = b\"a\" * (60 << 20); import time; time.sleep(300)'"
    loud = await run(sandbox, f"{hold} & {hold} & {hold} & yes", memory_mb=120)
    assert loud["ended"] == "memory"


def _sleepers(seconds: str) -> list[str]:
    """The processes of this machine that sleep for so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


async def _until(seconds: str, n: int) -> None:
    async with asyncio.timeout(60):
        while len(_sleepers(seconds)) != n:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["given up", "killed", "the zygote is killed"])
async def test_all_programs_end_with_their_sandbox(sandboxes: Sandboxes, how: str) -> None:
    sandbox = await sandboxes.start(ShellProgram())
    seconds = f"600.{secrets.randbits(60)}"
    call = asyncio.ensure_future(run(sandbox, f"nohup sleep {seconds} & sleep {seconds}; true", timeout_s=300))
    await _until(seconds, 2)
    if how == "given up":
        call.cancel()
    elif how == "killed":
        sandbox.end("time", "by a test")
    else:
        sandbox.zygote.destroy()
    with pytest.raises((SandboxFailed, asyncio.CancelledError)):
        await call
    await _until(seconds, 0)
    await sandbox.close()


SERVICE = """
import asyncio, sys
from services.env.sandbox.limits import ShellProgram
from services.env.sandbox.sandboxes import Sandboxes

async def main():
    async with Sandboxes() as sandboxes:
        sandbox = await sandboxes.start(ShellProgram())
        asked = {"cwd": "/", "env": {}, "timeout_s": 600, "cpu_s": 9, "memory_mb": 100, "max_output": 100}
        await sandbox.call("command", {**asked, "text": f"nohup sleep {sys.argv[1]} & sleep {sys.argv[1]}; true"}, 600)

asyncio.run(main())
"""


async def test_all_programs_end_with_a_service_that_is_killed(sandboxes: Sandboxes) -> None:
    seconds = f"600.{secrets.randbits(60)}"
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE, seconds, cwd=ROOT)
    try:
        await _until(seconds, 2)
    finally:
        service.kill()
        await service.wait()
    await _until(seconds, 0)


async def test_programs_take_no_turns(sandboxes: Sandboxes) -> None:
    with pytest.raises(InputError, match="takes no turns"):
        await sandboxes.start(ShellProgram(), owner="one")


async def test_without_namespaces_no_program_is_started() -> None:
    async with Sandboxes(namespaces=False) as plain:
        with pytest.raises(Forbidden, match="a sandbox cannot start programs here"):
            await plain.start(ShellProgram())
