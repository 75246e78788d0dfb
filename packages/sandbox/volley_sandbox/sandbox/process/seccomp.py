"""System calls that a sandbox may make: an allow list, compiled to a BPF program with libseccomp.

Other calls fail: frequently tried ones with EPERM, the rest with ENOSYS, so that libraries use their older fallback. A
call of another architecture (32 bits, x32) kills the process. Seccomp cannot read behind pointers, so calls with flags
in a structure (clone3, openat2) are not listed.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import Unavailable

_FILES = """
access chdir close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir
fdatasync fstat fstatfs fsync ftruncate getcwd getdents getdents64 lseek lstat mkdir mkdirat newfstatat pread64 preadv
preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat renameat2 rmdir sendfile
stat statfs statx symlink symlinkat umask unlink unlinkat link linkat write writev
"""
_METADATA = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat truncate"
"""Calls on files that Landlock does not check (truncate: before its third version)."""
_MEMORY = "brk madvise mprotect mremap msync munmap mlock munlock rseq"
_TIME = """
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timerfd_create
timerfd_gettime timerfd_settime times
"""
"""Excludes timer_create: such a timer can send any signal, including the one that resumes a paused process."""
_WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pause pipe pipe2 poll ppoll
pselect6 select signalfd signalfd4
"""
_PROCESS = """
arch_prctl capget exit exit_group futex futex_wait futex_wake futex_waitv get_robust_list get_thread_area getcpu
getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
getrusage getsid gettid getuid restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler
sched_rr_get_interval sched_yield set_robust_list set_tid_address setrlimit sigaltstack sysinfo uname wait4 waitid
"""
_SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
"""Allowed only where Landlock confines signals to the sandbox."""
_PROGRAMS = """
execve execveat fork vfork flock setpgid getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
setsid setuid setgid setreuid setregid setresuid setresgid
"""
"""Additional calls that programs need.

The only other processes are those that they started, and make drops rights that it does not have when it starts
programs. Libraries of agents start shells in sessions.
"""
_SOCKETS = "accept accept4 bind connect listen recvmsg recvmmsg sendmsg sendmmsg setsockopt"
_REFUSED = """
accept bind chown chroot connect execve execveat fork vfork lchown fchown fchownat listen mount umount2 ptrace
process_vm_readv process_vm_writev setuid setgid setresuid setresgid setreuid setregid setgroups setns unshare bpf
memfd_create io_uring_setup setsid socket keyctl add_key perf_event_open userfaultfd pidfd_open pidfd_getfd mknod
mknodat
"""
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
"""Flags that together map memory of no file; it survives when none of its pages is mapped, so it cannot be counted."""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000 | 0x00002000
_PRCTL = {"PR_GET_DUMPABLE": 3, "PR_SET_NAME": 15, "PR_GET_NAME": 16, "PR_GET_SECCOMP": 21, "PR_SET_VMA": 0x53564D41}
_FCNTL = {
    "F_DUPFD": 0,
    "F_GETFD": 1,
    "F_SETFD": 2,
    "F_GETFL": 3,
    "F_SETFL": 4,
    "F_GETLK": 5,
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_GETLK": 36,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_DUPFD_CLOEXEC": 1030,
    "F_GETPIPE_SZ": 1032,
    "F_GET_SEALS": 1034,
}
_IOCTL = {
    "TCGETS": 0x5401,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
    "TCGETS2": 0x802C542A,
}
_AF_UNIX, _AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_TYPE = 1, 2, 10, 1, 0xF
_SOL_SOCKET = 1
_GETSOCKOPT = {"SO_TYPE": 3, "SO_ERROR": 4, "SO_PROTOCOL": 38, "SO_DOMAIN": 39}
_ACCESS_MODE, _O_TRUNC = 0o3, 0o1000


def build_program(*, signals: bool, metadata: bool, programs: bool = False) -> bytes:
    """Build the filter for this machine, 8 bytes an instruction.

    Args:
        signals: allow signals, because Landlock confines them or there is no other process.
        metadata: allow changes of file modes and times, because only the sandbox's files are visible.
        programs: allow starting and ending programs, because the namespaces hold nothing else, and stream sockets,
            because the network namespace has a loopback interface only.

    Raises Unavailable if libseccomp is missing or too old. Takes up to 50 ms to find the library.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"seccomp cannot be used: {error}", "install libseccomp (Debian: libseccomp2)") from error
    try:
        return _exported(pyseccomp, signals or programs, metadata, programs)
    except OSError as error:
        raise Unavailable(f"libseccomp cannot make the filter: {error}", "install a newer libseccomp") from error


def _exported(library: Any, signals: bool, metadata: bool, programs: bool) -> bytes:
    rules = library.SyscallFilter(library.ERRNO(errno.ENOSYS))
    rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
    allowed = [*_FILES.split(), *_MEMORY.split(), *_TIME.split(), *_WAITING.split(), *_PROCESS.split()]
    allowed += _SIGNALS.split() if signals else []
    allowed += _METADATA.split() if metadata else []
    allowed += [*_PROGRAMS.split(), *_SOCKETS.split()] if programs else []
    conditions = {**_conditions(library, programs), **(_of_sockets(library) if programs else {})}
    for name in allowed:
        _add(library, rules, library.ALLOW, name)
    for name in [*_REFUSED.split(), *_SIGNALS.split(), *_METADATA.split()]:
        if name not in allowed and name not in conditions:
            _add(library, rules, library.ERRNO(errno.EPERM), name)
    if programs:
        shared = _MAP_SHARED | _MAP_ANONYMOUS
        _add(library, rules, library.ERRNO(errno.EPERM), "mmap", library.Arg(3, library.MASKED_EQ, shared, shared))
    for name, alternatives in conditions.items():
        for condition in alternatives:
            _add(library, rules, library.ALLOW, name, *condition)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _conditions(library: Any, programs: bool) -> Mapping[str, Sequence[Sequence[Any]]]:
    """Conditions on the arguments of calls: one of the listed conditions must hold in all its parts."""

    def equal(argument: int, value: int) -> Any:
        return library.Arg(argument, library.EQ, value)

    def masked(argument: int, mask: int, value: int) -> Any:
        return library.Arg(argument, library.MASKED_EQ, mask, value)

    mapped = (0, _MAP_SHARED, _MAP_ANONYMOUS)
    shared = _MAP_SHARED | _MAP_ANONYMOUS
    opened = (0, 1, 2, 1 | _O_TRUNC, 2 | _O_TRUNC)
    return {
        "mmap": [[masked(3, shared, kind)] for kind in mapped] if programs else [[]],
        "clone": [[masked(0, _CLONE_NEW, 0) if programs else masked(0, _CLONE_THREAD | _CLONE_NEW, _CLONE_THREAD)]],
        "open": [[masked(1, _ACCESS_MODE | _O_TRUNC, mode)] for mode in opened],
        "openat": [[masked(2, _ACCESS_MODE | _O_TRUNC, mode)] for mode in opened],
        "prctl": [[equal(0, option)] for option in _PRCTL.values()],
        "fcntl": [[equal(1, command)] for command in _FCNTL.values()],
        "ioctl": [[equal(1, request)] for request in _IOCTL.values()],
        "prlimit64": [[equal(0, 0)]],
        # A pair of connected sockets lets an event loop wake itself: no addresses, no descriptors, no out-of-band data.
        "socketpair": [[equal(0, _AF_UNIX), masked(1, _SOCK_TYPE, _SOCK_STREAM)]],
        "sendto": [[equal(3, 0), equal(4, 0)]],
        "recvfrom": [[equal(3, 0), equal(4, 0)]],
        "getsockopt": [[equal(1, _SOL_SOCKET), equal(2, option)] for option in _GETSOCKOPT.values()],
        "getsockname": [[]],
        "getpeername": [[]],
        "shutdown": [[]],
    }


def _of_sockets(library: Any) -> Mapping[str, Sequence[Sequence[Any]]]:
    """Conditions on calls of a loopback network: stream sockets, and no condition on addresses and options."""
    stream = library.Arg(1, library.MASKED_EQ, _SOCK_TYPE, _SOCK_STREAM)
    families = (_AF_UNIX, _AF_INET, _AF_INET6)
    return {
        "socket": [[library.Arg(0, library.EQ, family), stream] for family in families],
        "sendto": [[]],
        "recvfrom": [[]],
        "getsockopt": [[]],
    }


def _add(library: Any, rules: Any, action: int, name: str, *conditions: Any) -> None:
    """Add a rule. A call unknown to this architecture or libseccomp stays forbidden."""
    try:
        number = library.resolve_syscall(library.Arch.NATIVE, name)
    except (ValueError, OSError):
        return
    if number is not None and number >= 0:
        rules.add_rule(action, number, *conditions)
