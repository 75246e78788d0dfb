"""Linux system calls without a Python function, through ctypes.

Runs on any Python from 3.10 on with only the standard library. The module can be imported on other systems, where none
of its functions is called.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

IS_LINUX = os.uname().sysname == "Linux"

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 0, 1, 2
CAP_FOWNER, CAP_KILL, CAP_SETGID, CAP_SETUID = 3, 5, 6, 7

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 22, 38
_SECCOMP_MODE_FILTER = 2
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name, *args):
    """Call a C function. Raises OSError with its name."""
    result = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _long(value):
    return ctypes.c_long(value)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())


def bind_read_only(source: str, target: str, devices: bool = False) -> None:
    """Mount `source` at `target` read-only, with all mounts below it.

    Flags are only added to those of the mount, because an inherited flag cannot be removed.
    """
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        None,
        ctypes.c_ulong(MS_BIND | (0 if devices else MS_REC)),
        None,
    )
    if devices:
        return
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    _call(
        "syscall",
        _long(_SYS_MOUNT_SETATTR),
        _long(_AT_FDCWD),
        os.fsencode(target),
        _long(_AT_RECURSIVE),
        attributes,
        _long(len(attributes)),
    )


def remount_read_only(path: str, flags: int) -> None:
    """Remount read-only.

    Args:
        flags: flags that the mount has.
    """
    mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def change_root(folder: str) -> None:
    """Make `folder` the root and detach the old root. Needs a private mount namespace."""
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def set_parent_death_signal(number: int) -> None:
    _call("prctl", _PR_SET_PDEATHSIG, _long(number), _long(0), _long(0), _long(0))


def forbid_new_privileges() -> None:
    _call("prctl", _PR_SET_NO_NEW_PRIVS, _long(1), _long(0), _long(0), _long(0))


def forbid_inspection() -> None:
    """Forbid core dumps, tracing and reading of memory by the same user."""
    _call("prctl", _PR_SET_DUMPABLE, _long(0), _long(0), _long(0), _long(0))


def keep_capabilities() -> None:
    """Keep capabilities across the next change of user."""
    _call("prctl", _PR_SET_KEEPCAPS, _long(1), _long(0), _long(0), _long(0))


def set_capabilities(mask: int) -> None:
    """Set effective and permitted capabilities. None are inheritable."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _call("capset", header, struct.pack("=6I", low, low, 0, high, high, 0))


def install_filter(program: bytes) -> None:
    """Install a seccomp filter in this process, irrevocably.

    Args:
        program: classic BPF, 8 bytes an instruction.
    """
    code = ctypes.create_string_buffer(program, len(program))

    class Header(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    header = Header(len(program) // 8, ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, _long(_SECCOMP_MODE_FILTER), ctypes.byref(header), _long(0), _long(0))


def landlock_abi() -> int:
    """Version of Landlock that the kernel offers; 0 if none."""
    if not IS_LINUX:
        return 0
    version = _libc.syscall(_long(_SYS_LANDLOCK_CREATE), None, _long(0), _long(1))
    return max(version, 0)


_FILE_EXECUTE, _FILE_WRITE, _FILE_READ, _DIR_READ = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _FILE_EXECUTE | _FILE_WRITE | _FILE_READ | _TRUNCATE | _IOCTL


def restrict_files(
    abi: int, read: list[str], write: list[str], devices: list[str], run: list[str], network: bool = False
) -> None:
    """Restrict this process and its threads to these files, forbid TCP, and confine signals.

    Args:
        abi: version of Landlock to use; the kernel's documentation lists what each version adds.
        read: folders and files that may be read; missing ones are skipped.
        write: folders in which everything is allowed except making devices and sockets and running programs.
        devices: files that may be read and written.
        run: folders and files that may be read and run.
        network: do not forbid TCP, because the network namespace has a loopback interface only.
    """
    handled = (1 << 13) - 1
    handled |= ((1 << 13) if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL if abi >= 5 else 0)
    scoped = 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 and not network else 0, scoped)
    attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _call("syscall", _long(_SYS_LANDLOCK_CREATE), attributes, _long(len(attributes)), _long(0))
    all_there = handled & ~(_FILE_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _IOCTL)
    for paths, access in (
        (read, _FILE_READ | _DIR_READ),
        (write, all_there),
        (devices, (_FILE_READ | _FILE_WRITE)),
        (run, (_FILE_READ | _DIR_READ | _FILE_EXECUTE)),
    ):
        for path in paths:
            _allow(ruleset, path, access)
    _call("syscall", _long(_SYS_LANDLOCK_RESTRICT), _long(ruleset), _long(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = struct.pack("=Qi", access, beneath)
        _call("syscall", _long(_SYS_LANDLOCK_ADD), _long(ruleset), _long(1), rule, _long(0))
    finally:
        os.close(beneath)
