"""Confinement of a sandbox: irrevocable, and complete before any untrusted code is read.

Invariant: every announced step succeeds, or the process ends. No step is weakened or skipped.
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
"""Descriptor for requests and answers; 0 is empty, 1 and 2 are the log."""

DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full"]
_LIBRARIES = ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64"]
_FILES = ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime"]
_FIRST_UID, _UIDS = 61184, 4096
"""User ids that systemd reserves for dynamic users."""


@dataclass(frozen=True)
class Confinement:
    """Confinement of all sandboxes of this zygote.

    Args:
        landlock: version of Landlock to use, 0 for none.
        program: the seccomp filter, empty for none.
        read: folders and files that may be read.
        proc: the old /proc, if an ordinary user entered `namespaces`.
        namespaces: True if the zygote is in its own namespaces.
        reads_all: root's Python is unreadable for other users, so sandboxes keep the right to read everything, which
        Landlock restricts to `read`.
        privileged: True if the zygote runs as root and may give every sandbox its own user.
        programs: True if its sandboxes start programs; each then has its own root, its own pid namespace, and a
        loopback network with a door, see namespaces.open_door.
        shown: folders that their programs also see.
    """

    landlock: int
    program: bytes
    read: tuple
    proc: int | None
    namespaces: bool
    reads_all: bool
    privileged: bool
    programs: bool
    shown: tuple = ()


def python_folders() -> list[str]:
    """Files and folders that Python and its extension modules read."""
    own = [os.path.dirname(os.path.abspath(os.__file__)), os.path.join(sys.base_prefix, "lib"), *sys.path]
    own += [os.path.join(sys.base_exec_prefix, getattr(sys, "platlibdir", "lib"))]
    return [path for path in dict.fromkeys([*own, *_LIBRARIES, *_FILES]) if os.path.exists(path)]


def system_folders() -> list[str]:
    """Files and folders that programs need: the machine's own, without its owner's configuration in /etc."""
    in_etc = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "os-release")
    return ["/usr", "/bin", "/sbin", *_LIBRARIES, *(f"/etc/{name}" for name in in_etc), sys.base_prefix]


def site_packages() -> list[str]:
    """Folders of installed packages inside the standard library's folder."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    found = [os.path.join(library, name) for name in ("site-packages", "dist-packages")]
    return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]


def hides_python(paths: list[str], parents: bool) -> bool:
    """True if other users cannot read `paths` or, with `parents`, reach them."""
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
    """Effective capabilities as a mask; 0 on systems without them."""
    if not linux.IS_LINUX:
        return 0
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def is_privileged(reads_all: bool) -> bool:
    """True for root with all capabilities to manage other users' processes.

    A container may lack some. `reads_all`: those processes also need the capability to read everything.
    """
    wanted = {linux.CAP_CHOWN, linux.CAP_DAC_OVERRIDE, linux.CAP_FOWNER, linux.CAP_KILL}
    wanted |= {linux.CAP_SETGID, linux.CAP_SETUID} | ({linux.CAP_DAC_READ_SEARCH} if reads_all else set())
    mask = sum(1 << number for number in wanted)
    return os.getuid() == 0 and capabilities() & mask == mask


def prefer_for_oom_kill() -> None:
    """Make the kernel kill sandboxes first when memory runs out."""
    if linux.IS_LINUX:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("1000")


def user_of(number: int) -> int:
    """User id of a sandbox of a root zygote, unique among live sandboxes."""
    return _FIRST_UID + number % _UIDS


def enter(
    what: Confinement, number: int, limits: dict[str, Any], tmp: str, parent: int, alive: int | None = None
) -> None:
    """Confine this process, a new child of the zygote.

    Args:
        number: the sandbox's number.
        limits: the fields of SandboxLimits.
        tmp: the private folder; with namespaces it is mounted here.
        parent: the zygote's process id.
        alive: for the first process of a pid namespace, a descriptor that reads as ended when the waiting process is
        gone.

    Raises OSError or ValueError; the process must then end.
    """
    os.setsid()
    uid = user_of(number) if what.privileged else os.getuid()
    if what.programs:
        namespaces.enter_private_root(uid, limits["disk_mb"], DEVICES, what.shown)
    elif what.namespaces:
        namespaces.enter_own(uid, uid, limits["disk_mb"])
    elif what.privileged:
        os.chown(tmp, uid, uid)
    os.chdir("/" if what.programs else tmp)
    os.umask(0o022 if what.programs else 0o077)
    bounds_threads = what.privileged or what.namespaces
    set_limits(limits, (*(() if bounds_threads else ("NPROC",)), *(("CPU", "AS") if what.programs else ())))
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
        if what.programs:
            linux.restrict_files(what.landlock, [], ["/"], DEVICES, ["/"], network=True)
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


def set_limits(limits: dict[str, Any], left_out: tuple[str, ...]) -> None:
    """Set resource limits.

    Args:
        left_out: those that something else sets or enforces. A sandbox that starts programs sets CPU time and address
        space for them.
    """
    mega = 1 << 20
    wanted = {
        "CPU": (limits["cpu_s"], limits["cpu_s"] + 2),
        "AS": limits["memory_mb"] * mega,
        "NPROC": limits["threads"],
        "FSIZE": limits["file_mb"] * mega,
        "NOFILE": limits["open_files"],
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 256,
        "RTPRIO": 0,
        "NICE": 0,
    }
    for name, value in wanted.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None or name in left_out or (name == "AS" and not linux.IS_LINUX):
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
