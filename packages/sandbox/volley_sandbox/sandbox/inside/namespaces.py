"""Linux namespaces: a network without interfaces, private processes and names, and a root of a few folders.

The zygote enters them once; every sandbox then gets its own folder /sandbox (also called /tmp), a tmpfs of bounded size
that disappears with it. A sandbox that starts programs also has a pid namespace, so that all of them end with it, and
its own root.

root makes namespaces directly and gives every sandbox its own user. An ordinary user makes a user namespace first, and
another one for every sandbox, so that the limit of threads applies to each sandbox separately.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys

import linux

NAMES = ("network", "ipc", "uts", "pid", "mount")
TMP = "/sandbox"
NOBODY = 65534
HOME = "/root"
"""The user's home folder in a private root."""

DOOR = ("127.0.0.1", 4010)
"""Address inside a sandbox at which its program reaches the service."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_HARMLESS = {"/dev/zero": "/dev/full"}
"""Replacement of a device: it reads alike but cannot be mapped, which would make memory that no process shows."""
_FLAGS = linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWPID | linux.CLONE_NEWNS


def enter(
    root: str, privileged: bool, read: list[str], devices: list[str], hidden: list[str], programs: bool = False
) -> int | None:
    """Move this process into new namespaces; the next process that it forks is the first of the pid namespace.

    Args:
        root: an empty folder, on which the new root is built; invisible outside.
        privileged: True for root; an ordinary user makes a user namespace.
        read: folders and files that are visible, read-only, under the same paths.
        devices: device files that are visible.
        hidden: folders in `read` that appear empty.
        programs: its sandboxes start programs. An ordinary user may mount a new /proc only where an old one is visible.

    Returns a descriptor of the old /proc for `enter_user`, None for root, which needs none. Raises OSError; this
    process is then unusable.
    """
    uid, gid = os.getuid(), os.getgid()
    proc = None
    if privileged:
        linux.unshare(_FLAGS)
    else:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        linux.unshare(_FLAGS | linux.CLONE_NEWUSER)
        _map(proc, uid, gid)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=4m,nr_inodes=4096,mode=0755")
    _populate(root, read, devices)
    for path in hidden:
        linux.mount("tmpfs", root + path, "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "size=4k")
    if programs and not privileged:
        os.mkdir(root + "/proc")
        linux.mount("/proc", root + "/proc", "", linux.MS_BIND | linux.MS_REC)
    linux.change_root(root)
    linux.remount_read_only("/", linux.MS_NOSUID | linux.MS_NODEV)
    return proc


def enter_user(proc: int | None) -> None:
    """Give this child of an ordinary user's zygote its own user namespace; nothing for root's. Raises OSError."""
    if proc is not None:
        linux.unshare(linux.CLONE_NEWUSER)
        _map(proc, NOBODY, NOBODY)


def enter_own(uid: int, gid: int, disk_mb: int) -> None:
    """Give this child its own mount namespace with a fresh TMP for `uid`. Raises OSError."""
    linux.unshare(linux.CLONE_NEWNS)
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount(
        "tmpfs",
        TMP,
        "tmpfs",
        flags,
        f"size={disk_mb}m,nr_inodes={max(1024, 64 * disk_mb)},mode=0700,uid={uid},gid={gid}",
    )


def enter_pid_namespace() -> int:
    """Return in the first process of a new pid namespace.

    Returns a descriptor that reads as ended when the present process is gone. The present process waits for the new one
    and ends as it does. Raises OSError.
    """
    alive, held = os.pipe()
    linux.unshare(linux.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        os.close(held)
        return alive
    linux.set_parent_death_signal(signal.SIGKILL)
    os.closerange(0, held)
    os.closerange(held + 1, 256)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def open_door() -> socket.socket:
    """Move this process into a network namespace of its own, and return a socket that listens on its loopback.

    Whoever accepts the connections is all that programs of the namespace can reach. Raises OSError.
    """
    linux.unshare(linux.CLONE_NEWNET)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    fcntl.ioctl(listening, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    listening.bind(DOOR)
    listening.listen(128)
    return listening


def enter_private_root(uid: int, disk_mb: int, devices: list[str], shown: tuple[str, ...] = ()) -> None:
    """Give a pid namespace's first process a private root that `uid` may write, and that shows the folders `shown`.

    The root is a tmpfs. The system's folders are mounted read-only, below sticky folders owned by root, so that no
    process inside can replace them. An ordinary user owns those folders; they are mounted on themselves, because the
    kernel renames and removes no mounted folder. Raises OSError.
    """
    linux.unshare(linux.CLONE_NEWNS)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", TMP, "tmpfs", flags, f"size={disk_mb}m,nr_inodes={max(1024, 64 * disk_mb)},mode=1777")
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.isdir(path):
            _show(os.path.realpath(path), TMP + path, devices=False)
    if not sys.base_prefix.startswith("/usr/"):
        _show(sys.base_prefix, TMP + sys.base_prefix, devices=False)
    for path in shown:
        _show(path, TMP + path, devices=False)
    for path in ("/tmp", "/var/tmp", "/opt", HOME, os.path.dirname(sys.base_prefix)):  # noqa: S108
        os.makedirs(TMP + path, exist_ok=True)
        while path != "/" and not path.startswith("/usr"):
            os.chmod(TMP + path, 0o1777)  # noqa: S103 - the mode of /tmp
            path = os.path.dirname(path)
    if uid == NOBODY:
        for path in sorted({above for one in (sys.base_prefix, *shown) for above in _above(one)}):
            linux.mount(TMP + path, TMP + path, "", linux.MS_BIND | linux.MS_REC)
    _make_etc(TMP + "/etc", uid)
    _make_dev(TMP + "/dev", devices)
    os.mkdir(TMP + "/proc")
    linux.mount("proc", TMP + "/proc", "proc", flags | linux.MS_NOEXEC | linux.MS_RDONLY, "subset=pid")
    linux.change_root(TMP)


def _above(path: str) -> list[str]:
    """Folders above an absolute path, except the root and those below /usr."""
    parts = os.path.dirname(path).split("/")[1:]
    found = ["/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)] if parts != [""] else []
    return [one for one in found if one != "/usr" and not one.startswith("/usr/")]


def _make_etc(etc: str, uid: int) -> None:
    """Make /etc with the only user's names and the files that the machine's programs read."""
    os.mkdir(etc)
    names = {
        "passwd": f"user:x:{uid}:{uid}::{HOME}:/bin/bash\n",
        "group": f"user:x:{uid}:\n",
        "hosts": "127.0.0.1 localhost\n",
    }
    for name, text in names.items():
        with open(f"{etc}/{name}", "x", encoding="utf-8") as file:
            file.write(text)
    for name in os.listdir("/etc"):
        _show(f"/etc/{name}", f"{etc}/{name}", devices=False)
    linux.bind_read_only(etc, etc)


def _make_dev(dev: str, devices: list[str]) -> None:
    os.mkdir(dev)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{dev}/{name}")
    os.symlink("/tmp", f"{dev}/shm")  # noqa: S108
    there = [path for path in devices if os.path.exists(path)]
    for path in there:
        os.close(os.open(dev + path.removeprefix("/dev"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    linux.bind_read_only(dev, dev)
    for path in there:
        linux.bind_read_only(_HARMLESS.get(path, path), dev + path.removeprefix("/dev"), devices=True)


def _map(proc: int, uid: int, gid: int) -> None:
    """Map `uid` to nobody, the only user inside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _populate(root: str, read: list[str], devices: list[str]) -> None:
    os.makedirs(root + TMP)
    for path in ("/lib", "/lib32", "/lib64", "/bin", "/sbin"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
    shown = sorted({name for path in read if os.path.exists(path) for name in (path, os.path.realpath(path))})
    done: list[str] = []
    for path in shown:
        if os.path.islink(root + path) or any(path == other or path.startswith(other + "/") for other in done):
            continue
        _show(path, root + path, devices=False)
        done.append(path)
    for path in devices:
        if os.path.exists(path):
            _show(path, root + path, devices=True)
    if not os.path.exists(root + "/tmp"):  # noqa: S108
        os.symlink(TMP.lstrip("/"), root + "/tmp")  # noqa: S108


def _show(source: str, target: str, devices: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    linux.bind_read_only(source, target, devices)
