"""Sandboxes of agents: what their programs can do, and what they cannot do to the system, to each other, to what runs
them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.errors import Forbidden, InputError, SandboxFailed
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    """Skips where sandboxes cannot start programs."""
    async with Sandboxes() as opened:
        try:
            await opened.probe_programs()
        except Forbidden as error:
            pytest.skip(error.detail)
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(60):
        opened = await begun(sandboxes)
        try:
            yield opened
        finally:
            await opened.close()


AGENT = EnvironmentProgram(
    """
class Runs:
    splits = {"train": 1}
    command = ["bash", "-c", 'eval "$VOLLEY_MODEL"']
    def reset(self, split, index, seed):
        return "Run a command."
    def judge(self, output):
        return 0.0
""",
    kind="agent",
)
"""An agent whose program is a command of bash, the model's name."""


async def begun(sandboxes: Sandboxes) -> Sandbox:
    opened = await sandboxes.start(AGENT, SandboxLimits(threads=48))
    await opened.call("reset", {"split": "train", "index": 0, "seed": 0}, 10)
    return opened


async def run(sandbox: Sandbox, text: str, **changes: Any) -> dict[str, Any]:
    asked = {"base_url": "", "api_key": "", "timeout_s": 20, "memory_mb": 400, "max_output": 4000}
    return await sandbox.call("program", {**asked, "model": text, **changes}, 30)


async def said(sandbox: Sandbox, text: str) -> str:
    return (await run(sandbox, text))["output"]


async def test_programs_of_the_machine_run(sandbox: Sandbox) -> None:
    assert (
        await said(sandbox, "echo b > f; (cat f; echo a) | sort; cat <(echo c); ls; cp -a f g; cat g")
        == "a\nb\nc\nf\nb"
    )
    program = "import subprocess, sys; print(subprocess.check_output(['echo', 'in']).decode(), sys.version_info[0])"
    assert (await said(sandbox, f'python3 -c "{program}"')).split() == ["in", "3"]
    assert await said(sandbox, "printf 'all:\\n\\t@echo made; true\\n' > Makefile; ! type make >/dev/null || make") in (
        "made",
        "",
    )
    resets = "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}, resetids=True), 0); os.setuid(0)"
    assert "PermissionError" in await said(sandbox, f'python3 -c "{resets}" 2>&1 | tail -n 1')
    assert (await run(sandbox, "exit 3"))["exit"] == 3
    assert (await run(sandbox, "kill -9 $$"))["exit"] == 137
    assert await said(sandbox, "yes | head -n 1") == "y"  # which ends by SIGPIPE
    assert await said(sandbox, 'echo "$LEFT" "$HOME" "$(pwd)" ~user') == "/root /task /root"


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
    other = await begun(sandboxes)
    try:
        await run(other, "echo secret > /tmp/mine; chmod 777 /tmp/mine")
        assert "secret" not in await said(sandbox, "cat /tmp/mine /sandbox/mine 2>&1")
        listed = await said(sandbox, "ls -d /proc/[0-9]* | wc -l")
        assert int(listed) < 8, listed
        for text in (
            'python3 -c "import socket; socket.socket(type=socket.SOCK_DGRAM)"',
            "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53))\"",
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
    assert await said(sandbox, "echo fine") == "fine"


async def test_limits(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "sleep 300", timeout_s=0.2))["ended"] == "time"
    hold = "python3 -c 'x = b\"a\" * (60 << 20); import time; time.sleep(300)'"
    assert (await run(sandbox, f"{hold} & {hold} & {hold} & wait", memory_mb=120))["ended"] == "memory"
    limits = await run(sandbox, "ulimit -Ht; ulimit -Hv; ulimit -Hc; ulimit -t 999", memory_mb=100)
    assert (limits["output"].split()[:3], limits["exit"]) == (["60", str(4 * 100 * 1024), "0"], 1)
    tight = await run(sandbox, "python3 -c 'bytes(300 << 20)'", memory_mb=70)
    assert "MemoryError" in tight["output"]
    full = await run(sandbox, "for i in 1 2 3 4 5 6; do head -c 15M /dev/zero > f$i || exit 1; done")
    assert full["exit"] == 1, full
    flood = await run(sandbox, "head -c 20M /dev/zero | tr '\\0' x")
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
    assert await said(sandbox, f"cat > s.py <<'END'\n{SHARED}\nEND\npython3 s.py") == "fine 7"


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
    assert (await run(sandbox, "python3 f.py 3 0.4", memory_mb=190))["output"] == "fine"
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
    sandbox = await begun(sandboxes)
    seconds = f"600.{secrets.randbits(60)}"
    call = asyncio.ensure_future(run(sandbox, f"nohup sleep {seconds} & sleep {seconds}; true", timeout_s=300))
    await _until(seconds, 2)
    if how == "given up":
        call.cancel()
    elif how == "killed":
        sandbox.end("time", "by a test")
    else:
        sandbox.spawner.destroy()
    with pytest.raises((SandboxFailed, asyncio.CancelledError)):
        await call
    await _until(seconds, 0)
    await sandbox.close()


async def test_programs_take_no_turns(sandboxes: Sandboxes) -> None:
    with pytest.raises(InputError, match="takes no turns"):
        await sandboxes.start(AGENT, owner="one")
