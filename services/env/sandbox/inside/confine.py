"""How a sandbox gives up what it may do: once, before any code of a stranger is read, and for good.

Invariant: every step that the zygote announced succeeds, or the process ends. Nothing here gives less and goes on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from dataclasses import dataclass
from typing import Any

import linux
import namespaces

CHANNEL = 3
"""The descriptor on which a sandbox is asked and answers; 0 is empty, 1 and 2 are its log."""

DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full"]
_LIBRARIES = ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64"]
_FILES = ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime"]
_FIRST_UID, _UIDS = 61184, 4096
"""Users that systemd sets aside for processes that come and go."""


@dataclass(frozen=True)
class Confinement:
    """What all sandboxes of this zygote give up.

    Args:
        landlock: the version of Landlock to use, 0 for none.
        program: the seccomp filter, empty for none.
        read: folders and files that may be read.
        proc: the old /proc, where `namespaces` were entered by an ordinary user.
        namespaces: whether the zygote is in namespaces of its own.
        reads_all: root's Python lies where other users may not look, so sandboxes keep the right to read, of which
            Landlock leaves them `read`.
        privileged: whether the zygote is root's, and may give every sandbox a user of its own.
        shell: whether its sandboxes start programs; each then has a root and a pid namespace of its own.
    """

    landlock: int
    program: bytes
    read: tuple
    proc: int | None
    namespaces: bool
    reads_all: bool
    privileged: bool
    shell: bool


def python_folders() -> list[str]:
    """What Python and its extension modules need to read."""
    own = [os.path.dirname(os.path.abspath(os.__file__)), os.path.join(sys.base_prefix, "lib"), *sys.path]
    own += [os.path.join(sys.base_exec_prefix, getattr(sys, "platlibdir", "lib"))]
    return [path for path in dict.fromkeys([*own, *_LIBRARIES, *_FILES]) if os.path.exists(path)]


def system_folders() -> list[str]:
    """What programs that are started need: the machine's own, without what it is told by its owner in /etc."""
    in_etc = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "os-release")
    return ["/usr", "/bin", "/sbin", *_LIBRARIES, *(f"/etc/{name}" for name in in_etc), sys.base_prefix]


def site_packages() -> list[str]:
    """Folders inside the standard library's in which others have installed packages."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    found = [os.path.join(library, name) for name in ("site-packages", "dist-packages")]
    return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]


def hides_python(paths: list[str], parents: bool) -> bool:
    """Whether only their owner may read some of `paths`, or, if they stand where they are, pass on the way to them."""
    for path in [*paths, os.__file__]:
        at = os.path.realpath(path)
        wanted = 0o005 if os.path.isdir(at) else 0o004
        if os.stat(at).st_mode & wanted != wanted:
            return True
        while parents and at != os.path.dirname(at):
            at = os.path.dirname(at)
            if not os.stat(at).st_mode & 0o001:
                return True
    return False


def capabilities() -> int:
    """The effective ones, as a mask; 0 where there is no such thing."""
    if not linux.IS_LINUX:
        return 0
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def is_privileged(reads_all: bool) -> bool:
    """Whether this is root, with the rights to make processes of other users, to end them and to remove what they
    leave. Containers may lack some. `reads_all`: whether those processes need the right to read everything.
    """
    wanted = {linux.CAP_CHOWN, linux.CAP_DAC_OVERRIDE, linux.CAP_FOWNER, linux.CAP_KILL}
    wanted |= {linux.CAP_SETGID, linux.CAP_SETUID} | ({linux.CAP_DAC_READ_SEARCH} if reads_all else set())
    mask = sum(1 << number for number in wanted)
    return os.getuid() == 0 and capabilities() & mask == mask


def be_first_to_go() -> None:
    """When the machine's memory runs out, the kernel ends sandboxes before anything else."""
    if linux.IS_LINUX:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("1000")


def user_of(number: int) -> int:
    """The user of a sandbox, where the zygote is root's: no two that live have the same one."""
    return _FIRST_UID + number % _UIDS


def enter(
    what: Confinement, number: int, limits: dict[str, Any], tmp: str, parent: int, alive: int | None = None
) -> None:
    """Confines this process, a fresh child of the zygote.

    Args:
        number: of the sandbox.
        limits: the fields of SandboxLimits.
        tmp: the private folder; with namespaces it is mounted here.
        parent: the zygote's process id.
        alive: where this is the first process of a pid namespace: ended when the process that waits for it is gone.

    Raises OSError or ValueError; the process must then end.
    """
    os.setsid()
    uid = user_of(number) if what.privileged else os.getuid()
    if what.shell:
        namespaces.enter_private_root(uid, limits["disk_mb"], DEVICES)
    elif what.namespaces:
        namespaces.enter_own(what.proc, uid, uid, limits["disk_mb"])
    elif what.privileged:
        os.chown(tmp, uid, uid)
    os.chdir("/" if what.shell else tmp)
    os.umask(0o022 if what.shell else 0o077)
    _set_limits(limits, bounds_threads=what.privileged or what.namespaces, shell=what.shell)
    if linux.IS_LINUX:
        _drop_rights(what, uid)
        linux.set_parent_death_signal(signal.SIGKILL)
        if (os.getppid() != parent) if alive is None else bool(select.select([alive], [], [], 0)[0]):
            os._exit(1)
        linux.forbid_new_privileges()
        linux.forbid_inspection()
    _close_all_but(3)
    _clear_environment(tmp)
    if what.landlock:
        if what.shell:
            linux.restrict_files(what.landlock, [], ["/"], DEVICES, ["/"])
        else:
            linux.restrict_files(what.landlock, list(what.read), [tmp], DEVICES, [])
    if what.program:
        linux.install_filter(what.program)


def _drop_rights(what: Confinement, uid: int) -> None:
    if what.privileged:
        if what.reads_all:
            linux.keep_capabilities()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.set_capabilities(1 << linux.CAP_DAC_READ_SEARCH if what.reads_all else 0)


def _set_limits(limits: dict[str, Any], bounds_threads: bool, shell: bool) -> None:
    """What starts programs gives those their CPU time and address space; it has its own."""
    mega = 1 << 20
    wanted = {
        "CPU": (limits["cpu_s"], limits["cpu_s"] + 2),
        "AS": limits["memory_mb"] * mega,
        "FSIZE": limits["file_mb"] * mega,
        "NOFILE": limits["open_files"],
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 256,
        "RTPRIO": 0,
        "NICE": 0,
    }
    if bounds_threads:
        wanted["NPROC"] = limits["threads"]
    if shell:
        del wanted["CPU"], wanted["AS"]
    for name, value in wanted.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None or (name == "AS" and not linux.IS_LINUX):
            continue
        soft, hard = value if isinstance(value, tuple) else (value, value)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def _clear_environment(tmp: str) -> None:
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", HOME=tmp, TMPDIR=tmp, LANG="C.UTF-8", TZ="UTC", OPENBLAS_NUM_THREADS="1")


def _close_all_but(highest: int) -> None:
    os.closerange(highest + 1, max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16))
