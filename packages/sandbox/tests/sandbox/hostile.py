"""Programs that try to get out of a sandbox, or to hurt what is beside it. Data for test_hostile.py.

Every script prints ESCAPED if it got what it wanted. Words in @ are replaced by what there is to attack.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try:
        print("ESCAPED", repr(call())[:300])
    except Exception as error:
        print("held:", type(error).__name__, str(error)[:200])
def system_call(*numbers):
    if os.uname().machine != "x86_64":
        raise OSError("the numbers are those of x86_64")
    got = libc.syscall(*(ctypes.c_long(n) for n in numbers))
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got
"""


@dataclass(frozen=True)
class Script:
    """`why`: what the sandbox may end for; `must_end`: whether it has to."""

    name: str
    code: str
    why: frozenset[str] = frozenset()
    must_end: bool = False


def ends(name: str, code: str, *why: str) -> Script:
    return Script(name, code, frozenset(why), must_end=True)


def may_end(name: str, code: str, *why: str) -> Script:
    return Script(name, code, frozenset(why))


SCRIPTS = [
    # Time and CPU
    ends(
        "endless loop",
        """
while True: pass
""",
        "cpu",
        "time",
    ),
    ends(
        "endless loop that ignores signals",
        """
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except Exception: pass
while True: pass
""",
        "cpu",
        "time",
    ),
    ends(
        "endless search in C",
        """
import re; re.match(r'(a+)+$', 'a' * 60 + 'b')
""",
        "cpu",
        "time",
    ),
    ends(
        "endless power in C",
        """
x = 7 ** 10 ** 9
""",
        "cpu",
        "memory",
        "time",
    ),
    ends(
        "endless sum in C",
        """
sum(iter(int, 1))
""",
        "cpu",
        "time",
    ),
    ends(
        "sleeps for ever",
        """
time.sleep(1e6)
""",
        "time",
    ),
    may_end(
        "stops itself",
        """
os.kill(os.getpid(), 19)
""",
        "time",
    ),
    ends(
        "raises SIGALRM",
        """
import signal; signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(9)
""",
        "crash",
    ),
    # Memory
    ends(
        "memory at once",
        """
x = bytearray(4 << 30)
""",
        "memory",
    ),
    ends(
        "memory by bits",
        """
x = []
while True: x.append(bytearray(1 << 20))
""",
        "memory",
    ),
    ends(
        "memory by small objects",
        """
x = []
while True: x.append([None])
""",
        "cpu",
        "memory",
        "time",
    ),
    ends(
        "memory as a text",
        """
x = 'a'
while True: x += x
""",
        "memory",
    ),
    Script(
        "anonymous mappings",
        """
import mmap
kept = []
try:
    while True: kept.append(mmap.mmap(-1, 64 << 20))
except OSError: print('held')
if len(kept) > 16: print('ESCAPED', len(kept))
""",
    ),
    Script(
        "locked memory",
        """
attempt(lambda: 1 / (libc.mlock(ctypes.create_string_buffer(1 << 20), 1 << 20) == 0))
""",
    ),
    # Processes and threads
    Script(
        "fork",
        """
attempt(os.fork)
""",
    ),
    Script(
        "forks until it works",
        """
for i in range(10_000):
    try: os.fork()
    except OSError: continue
    print('ESCAPED')
    break
""",
    ),
    Script(
        "vfork and clone by number",
        """
for n in (57, 58):
    attempt(lambda: system_call(n))
attempt(lambda: system_call(56, 17, 0, 0, 0, 0))
attempt(lambda: system_call(435, 0, 88))
""",
    ),
    Script(
        "clone with new namespaces",
        """
for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000):
    attempt(lambda: system_call(56, flag | 17, 0, 0, 0, 0))
""",
    ),
    Script(
        "runs a program",
        """
import subprocess
attempt(lambda: subprocess.run(['/bin/sh', '-c', 'id'], capture_output=True))
attempt(lambda: os.posix_spawn('/bin/sh', ['sh'], {}))
attempt(lambda: os.execv('/bin/sh', ['sh', '-c', 'id']))
attempt(lambda: 1 / (os.system('id') == 0))
""",
    ),
    Script(
        "runs Python",
        """
attempt(lambda: os.execv(sys.executable, [sys.executable, '-c', '1']))
""",
    ),
    may_end(
        "thread bomb",
        """
import threading
threading.stack_size(32 << 10)
n = 0
try:
    for n in range(5000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except Exception as error: print('held', n)
time.sleep(1.5)
if n > 64: print('ESCAPED', n)
""",
        "refused",
    ),
    Script(
        "multiprocessing",
        """
import multiprocessing
attempt(lambda: multiprocessing.Process(target=print).start())
""",
    ),
    # Disk
    Script(
        "one big file",
        """
f = open('big', 'wb')
n = 0
try:
    while True: n += f.write(b'x' * (1 << 20)); f.flush()
except OSError: print('held', n >> 20)
if n > 20 << 20: print('ESCAPED', n)
""",
    ),
    may_end(
        "many big files",
        """
total = 0
try:
    for i in range(100):
        with open(f'f{i}', 'wb') as f:
            for _ in range(3): f.write(b'x' * (1 << 20)); f.flush(); total += 1
except OSError: print('held', total)
time.sleep(1.2)
if total > 40: print('ESCAPED', total)
""",
        "output",
    ),
    may_end(
        "many small files",
        """
n = 0
try:
    for n in range(200_000): open(f's{n}', 'w').close()
except OSError: print('held', n)
if n > 100_000: print('ESCAPED', n)
""",
        "cpu",
        "output",
        "time",
    ),
    may_end(
        "deep folders",
        """
n = 0
try:
    for n in range(20_000): os.mkdir('d', 0o700 if n % 2 else 0o300); os.chdir('d')
except OSError as error: print('held', n)
""",
        "cpu",
        "output",
        "time",
    ),
    Script(
        "sparse file",
        """
attempt(lambda: os.truncate('sparse', 1 << 40) or os.stat('sparse').st_size)
f = open('s2', 'wb')
attempt(lambda: f.truncate(1 << 40))
""",
    ),
    # Files and secrets
    Script(
        "reads passwd",
        """
attempt(lambda: open('/etc/passwd').read())
attempt(lambda: open('/etc/shadow').read())
""",
    ),
    Script(
        "lists folders",
        """
for path in ('/', '/root', '/home', '/etc', '/tmp/..', '/var', '/work', '@FOLDER@'):
    try: names = os.listdir(path)
    except OSError: continue
    if set(names) & {'etc', 'secret.txt', '.ssh', 'home', 'passwd', 'var'}: print('ESCAPED', path, names)
""",
    ),
    Script(
        "reads a secret file",
        """
attempt(lambda: open('@SECRET@').read())
attempt(lambda: os.open('@SECRET@', os.O_RDONLY | os.O_TRUNC))
attempt(lambda: os.open('@SECRET@', os.O_WRONLY))
""",
    ),
    Script(
        "changes a file outside",
        """
attempt(lambda: open('@SECRET@', 'a').write('x'))
attempt(lambda: os.truncate('@SECRET@', 0))
attempt(lambda: os.chmod('@SECRET@', 0o777))
attempt(lambda: os.utime('@SECRET@'))
attempt(lambda: os.unlink('@SECRET@'))
attempt(lambda: os.rename('@SECRET@', 'mine'))
""",
    ),
    Script(
        "makes a file outside",
        """
for path in ('@FOLDER@/pwned', '/tmp/../pwned', '/pwned', '/dev/shm/pwned', '/var/tmp/pwned', os.__file__ + 'x'):
    attempt(lambda: open(path, 'w'))
""",
    ),
    Script(
        "changes the standard library",
        """
attempt(lambda: open(os.__file__, 'a').write('import evil'))
attempt(lambda: os.unlink(os.__file__))
attempt(lambda: os.rename(os.__file__, os.__file__ + '.bak'))
attempt(lambda: os.chmod(os.__file__, 0o777))
""",
    ),
    Script(
        "environ of the parent",
        """
for pid in ('self', 'thread-self', os.getppid(), 1, @SERVICE@):
    for name in ('environ', 'mem', 'maps', 'fd', 'root/etc/passwd', 'cwd/..'):
        path = f'/proc/{pid}/{name}'
        attempt(lambda: os.listdir(path) if name in ('fd', 'cwd/..') else open(path, 'rb').read(10))
""",
    ),
    Script(
        "own environment",
        """
text = str(dict(os.environ))
libc.getenv.restype = ctypes.c_char_p
text += str(libc.getenv(b'VOLLEY_TEST_SECRET'))
if 'VOLLEY' in text or 'sesame' in text: print('ESCAPED', text)
""",
    ),
    Script(
        "stack of the first program",
        """
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
found = []
for i in range(200):
    if not environ[i]: break
    found.append(environ[i])
if any(b'sesame' in one for one in found): print('ESCAPED', found)
""",
    ),
    Script(
        "the repository",
        """
import importlib
for name in ('services', 'shared', 'shared.errors', 'orjson', 'pydantic', 'redis'):
    attempt(lambda: importlib.import_module(name))
attempt(lambda: open('@REPOSITORY@/pyproject.toml').read())
""",
    ),
    Script(
        "another sandbox's files",
        """
for path in ('@OTHER@', '@OTHER@/mine.txt'):
    if path.startswith('/'): attempt(lambda: open(path).read() if path.endswith('txt') else os.listdir(path))
if os.path.exists('mine.txt') or os.path.exists('/tmp/mine.txt'): print('ESCAPED')
""",
    ),
    Script(
        "a symbolic link out",
        """
os.symlink('/etc', 'etc'); os.symlink('@SECRET@', 'secret')
attempt(lambda: open('etc/passwd').read())
attempt(lambda: open('secret').read())
attempt(lambda: open('secret', 'w'))
""",
    ),
    Script(
        "a hard link out",
        """
attempt(lambda: os.link('@SECRET@', 'hard'))
attempt(lambda: os.link(os.__file__, 'hard2'))
attempt(lambda: os.link('/etc/passwd', 'hard3'))
""",
    ),
    Script(
        "mounts and roots",
        """
attempt(lambda: os.chroot('.'))
attempt(lambda: 1 / (libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0))
attempt(lambda: 1 / (libc.umount2(b'/tmp', 2) == 0))
attempt(lambda: 1 / (libc.unshare(0x10000000) == 0))
attempt(lambda: 1 / (libc.setns(3, 0) == 0))
attempt(lambda: system_call(155, 0, 0))
""",
    ),
    Script(
        "devices",
        """
import stat
attempt(lambda: os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
attempt(lambda: os.open('/dev/vda', os.O_RDONLY))
attempt(lambda: os.open('/dev/kmsg', os.O_RDONLY))
attempt(lambda: os.open('/dev/tty', os.O_RDWR))
attempt(lambda: os.open('/dev/ptmx', os.O_RDWR))
""",
    ),
    Script(
        "handles of files",
        """
attempt(lambda: system_call(303, -100, 0, 0, 0, 0))
attempt(lambda: system_call(304, 3, 0, 0))
""",
    ),
    # Network
    Script(
        "tcp and udp",
        """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
    for family in (socket.AF_INET, socket.AF_INET6):
        attempt(lambda: socket.socket(family, kind))
""",
    ),
    Script(
        "connects to a service here",
        """
import socket
attempt(lambda: socket.create_connection(('127.0.0.1', @PORT@), 1))
import urllib.request
attempt(lambda: urllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=1))
""",
    ),
    Script(
        "unix and abstract sockets",
        r"""
import socket
attempt(lambda: socket.socket(socket.AF_UNIX).connect('@UNIX@'))
attempt(lambda: socket.socket(socket.AF_UNIX).bind('\0volley'))
attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
""",
    ),
    Script(
        "other families",
        """
for family in (15, 16, 17, 31, 38, 40, 44):
    attempt(lambda: system_call(41, family, 3, 0))
""",
    ),
    Script(
        "a socket pair to elsewhere",
        """
import socket
a, b = socket.socketpair()
attempt(lambda: a.connect('@UNIX@'))
attempt(lambda: a.bind('x'))
attempt(lambda: a.sendto(b'x', '@UNIX@'))
attempt(lambda: a.send(b'x', socket.MSG_OOB))
attempt(lambda: socket.send_fds(a, [b'x'], [3]))
a.sendall(b'fine')
assert b.recv(4) == b'fine'
""",
    ),
    Script(
        "sends its descriptors to the service",
        """
import socket
channel = socket.socket(fileno=os.dup(3))
attempt(lambda: socket.send_fds(channel, [b'x'], [0, 1, 2]))
attempt(lambda: socket.recv_fds(channel, 10, 10))
""",
    ),
    # Signals and other processes
    Script(
        "signals to others",
        """
import signal
for pid in {os.getppid(), 1, @SERVICE@, @NEIGHBOUR@} - {os.getpid()}:
    for number in (0, 9, 19): attempt(lambda: os.kill(pid, number))
""",
    ),
    may_end(
        "kills everything",
        """
try: os.kill(-1, 9)
except OSError: print('held')
""",
        "crash",
        "memory",
    ),
    may_end(
        "kills its group",
        """
attempt(lambda: os.killpg(os.getpgid(os.getppid()), 9))
os.killpg(0, 9)
""",
        "crash",
        "memory",
    ),
    Script(
        "signals by other calls",
        """
for number in (200, 129, 297, 424, 234):
    attempt(lambda: system_call(number, @NEIGHBOUR@, @NEIGHBOUR@ if number == 234 else 9, 9, 0))
""",
    ),
    Script(
        "signals by owning a file",
        """
import fcntl
r, w = os.pipe()
attempt(lambda: fcntl.fcntl(r, 8, @NEIGHBOUR@))
attempt(lambda: fcntl.fcntl(r, 10, 9))
""",
    ),
    Script(
        "ptrace and foreign memory",
        """
for number in (101, 310, 311, 312, 434, 438, 440, 448):
    attempt(lambda: system_call(number, @NEIGHBOUR@, 0, 0, 0, 0, 0))
attempt(lambda: system_call(101, 16, os.getppid(), 0, 0))
""",
    ),
    Script(
        "limits of others",
        """
import resource
attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)))
attempt(lambda: resource.prlimit(@NEIGHBOUR@, resource.RLIMIT_CPU, (1, 1)))
""",
    ),
    Script(
        "raises its own limits",
        """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE"):
    kind = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(kind)
    if kind != resource.RLIMIT_NPROC or hard != -1: attempt(lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
""",
    ),
    Script(
        "other users",
        """
attempt(lambda: os.setuid(0))
attempt(lambda: os.setresuid(0, 0, 0))
attempt(lambda: os.setgid(0))
attempt(lambda: os.setgroups([0]))
attempt(lambda: 1 / (libc.prctl(8, 1, 0, 0, 0) == 0))
attempt(lambda: 1 / (libc.prctl(1, 0, 0, 0, 0) == 0))
attempt(lambda: 1 / (libc.prctl(4, 1, 0, 0, 0) == 0))
attempt(lambda: 1 / (libc.prctl(22, 0, 0, 0, 0) == 0))
""",
    ),
    # The kernel's odd corners
    Script(
        "calls that are dangerous",
        """
calls = (250, 248, 249, 321, 298, 323, 425, 426, 427, 319, 447, 175, 313, 246, 169, 167, 168, 163, 179, 103, 135, 153)
calls += (172, 173, 155, 165, 166, 272, 308, 429, 428, 430, 431, 432, 433, 442, 29, 64, 68, 240, 203, 314, 144, 251)
for number in calls:
    attempt(lambda: system_call(number, 0, 0, 0, 0, 0, 0))
""",
    ),
    ends(
        "calls of 32 bits",
        """
import mmap
if os.uname().machine != 'x86_64': os.kill(os.getpid(), 31)
code = bytes.fromhex('b814000000cd80c3')
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print('ESCAPED', call())
""",
        "refused",
    ),
    ends(
        "calls of x32",
        """
if os.uname().machine != 'x86_64': os.kill(os.getpid(), 31)
attempt(lambda: system_call(0x40000000 | 57))
attempt(lambda: system_call(0x40000000 | 39))
""",
        "refused",
    ),
    Script(
        "a file in memory to run",
        """
attempt(lambda: os.memfd_create('x'))
attempt(lambda: system_call(322, 3, 0, 0, 0, 0x1000))
""",
    ),
    # Descriptors
    Script(
        "hunts for descriptors",
        """
import stat
found = []
for fd in range(4096):
    try: found.append((fd, oct(os.fstat(fd).st_mode)))
    except OSError: pass
if [fd for fd, _ in found] != [0, 1, 2, 3]: print('ESCAPED', found)
""",
    ),
    ends(
        "closes everything",
        """
os.closerange(0, 4096)
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "swaps its descriptors",
        """
os.dup2(0, 3)
os.dup2(1, 2)
""",
        "crash",
        "protocol",
    ),
    ends(
        "closes its channel and goes on",
        """
os.close(3)
while True: time.sleep(1)
""",
        "protocol",
    ),
    # Output
    ends(
        "floods its output",
        """
block = b'x' * 65536
while True: os.write(1, block)
""",
        "output",
    ),
    Script(
        "floods what is captured",
        """
for i in range(1000): print('x' * 10_000)
""",
    ),
    ends(
        "floods the channel",
        r"""
block = b'\x00\x00\x00\x01x' * 10_000
while True: os.write(3, block)
""",
        "protocol",
        "time",
    ),
    ends(
        "a frame of four gigabytes",
        r"""
os.write(3, b'\xff\xff\xff\xff' + b'x' * 1000)
time.sleep(30)
""",
        "output",
    ),
    ends(
        "half a frame",
        r"""
os.write(3, b'\x00\x00\x10\x00{')
os._exit(0)
""",
        "crash",
    ),
    ends(
        "half a frame for ever",
        r"""
os.write(3, b'\x00\x00\x10\x00{')
time.sleep(30)
""",
        "time",
    ),
    ends(
        "a frame that is no JSON",
        r"""
os.write(3, b'\x00\x00\x00\x04\xff\xfe{]')
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "a frame with NaN",
        """
body = b'{"id": 2, "result": NaN}'
os.write(3, len(body).to_bytes(4, 'big') + body)
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "a frame that is deep",
        """
body = b'[' * 100_000
os.write(3, len(body).to_bytes(4, 'big') + body)
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "a frame with half a character",
        r"""
body = b'{"id": 2, "result": "\\ud800"}'
os.write(3, len(body).to_bytes(4, 'big') + body)
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "a frame with a huge number",
        """
body = b'{"id": 2, "result": {"stdout": 1' + b'0' * 5000 + b'}}'
os.write(3, len(body).to_bytes(4, 'big') + body)
time.sleep(30)
""",
        "protocol",
    ),
    ends(
        "another request's answer",
        """
body = b'{"id": 77, "result": {}}'
os.write(3, len(body).to_bytes(4, 'big') + body)
time.sleep(30)
""",
        "protocol",
    ),
    # Python
    ends(
        "exits at once",
        """
os._exit(3)
""",
        "crash",
    ),
    Script(
        "exits by name",
        """
sys.exit('bye')
""",
    ),
    ends(
        "aborts",
        """
os.abort()
""",
        "crash",
    ),
    ends(
        "reads address zero",
        """
ctypes.string_at(0)
""",
        "crash",
    ),
    may_end(
        "unbounded recursion in C",
        """
sys.setrecursionlimit(10**9)
def f(): return [f()]
class A:
    def __repr__(self): return repr(self)
repr(A())
""",
        "cpu",
        "crash",
        "memory",
        "time",
    ),
    Script(
        "recursion",
        """
def f(): return f()
f()
""",
    ),
    may_end(
        "an exception with a huge text",
        """
raise ValueError('x' * 50_000_000)
""",
        "memory",
    ),
    Script(
        "an exception whose text raises",
        """
class Evil(Exception):
    def __str__(self): raise SystemExit
    __repr__ = __str__
raise Evil
""",
    ),
    ends(
        "an exception whose text never ends",
        """
class Evil(Exception):
    def __str__(self):
        while True: pass
raise Evil
""",
        "cpu",
        "time",
    ),
    Script(
        "a class with a huge name",
        """
raise type('E' * 1_000_000, (Exception,), {})
""",
    ),
    ends(
        "breaks the builtins",
        """
import builtins, json
json.dumps = lambda *a, **k: 'nothing'
builtins.len = lambda x: 10**12
builtins.isinstance = None
""",
        "crash",
        "output",
        "protocol",
        "time",
    ),
    ends(
        "breaks os.write",
        """
os.write = lambda *a: 1 / 0
""",
        "crash",
        "protocol",
    ),
    may_end(
        "threads that survive",
        """
import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin, daemon=False).start()
raise SystemExit(0)
""",
        "cpu",
        "time",
    ),
    Script(
        "walks to the host's objects",
        """
import gc
found = [o for o in gc.get_objects() if type(o).__name__ in ('socket', 'Zygote')]
for one in found:
    try: number = one.fileno()
    except Exception: continue
    try: os.fstat(number)
    except OSError: continue
    if number not in (-1, 0, 1, 2, 3): print('ESCAPED', one)
""",
    ),
    Script(
        "a handle on the service's process",
        """
import socket
channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=os.dup(3))
for option in (17, 77, 31, 59):
    attempt(lambda: channel.getsockopt(socket.SOL_SOCKET, option, 64))
attempt(lambda: channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1))
""",
    ),
    Script(
        "other people's packages",
        """
folder = os.path.join(os.path.dirname(os.__file__), "site-packages")
if os.path.isdir(folder) and not os.path.exists("/proc"): attempt(lambda: 1 / len(os.listdir(folder)))
attempt(lambda: __import__("pip"))
attempt(lambda: __import__("numpy"))
""",
    ),
    Script(
        "splices memory",
        """
r, w = os.pipe()
for number in (275, 276, 278, 27):
    attempt(lambda: system_call(number, r, 0, w, 0, 10, 0))
""",
    ),
    Script(
        "a link by a descriptor",
        """
for path in ("@SECRET@", "/etc/passwd", os.__file__):
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        continue
    attempt(lambda: 1 / (libc.linkat(fd, b"", -100, b"hard", 0x1000) == 0))
    attempt(lambda: os.link(f"/proc/self/fd/{fd}", "hard2", follow_symlinks=True))
    attempt(lambda: open("hard").read())
    attempt(lambda: open(f"/dev/fd/{fd}", "a").write("x"))
    attempt(lambda: os.read(fd, 10))
    os.close(fd)
""",
    ),
    Script(
        "from inside another folder",
        """
for path in ("/", "/etc", "/root", "@FOLDER@", "@REPOSITORY@"):
    try:
        os.chdir(path)
        fd = os.open(".", os.O_PATH)
    except OSError:
        continue
    attempt(lambda: os.listdir("."))
    attempt(lambda: open("secret.txt").read())
    attempt(lambda: open("passwd").read())
    attempt(lambda: os.open("secret.txt", os.O_RDONLY, dir_fd=fd))
    attempt(lambda: os.mkdir("made", dir_fd=fd))
    attempt(lambda: os.rename("secret.txt", "moved", src_dir_fd=fd, dst_dir_fd=fd))
    os.close(fd)
""",
    ),
    Script(
        "moves and exchanges files across",
        """
AT = -100
open("mine", "w").write("x")
for flags in (0, 1, 2, 4):
    attempt(lambda: 1 / (libc.renameat2(AT, b"mine", AT, b"@SECRET@", flags) == 0))
    attempt(lambda: 1 / (libc.renameat2(AT, b"@SECRET@", AT, b"mine", flags) == 0))
attempt(lambda: os.rename(".", "@FOLDER@/taken"))
""",
    ),
    Script(
        "locks and leases",
        """
import fcntl
file = open(os.__file__)
attempt(lambda: fcntl.flock(file, fcntl.LOCK_EX))
attempt(lambda: fcntl.fcntl(file, 1024, 0))
attempt(lambda: fcntl.fcntl(file, 1026, 1))
attempt(lambda: fcntl.lockf(file, fcntl.LOCK_EX))
""",
    ),
    Script(
        "races a link",
        """
import threading
stop = time.monotonic() + 0.5
def swap():
    while time.monotonic() < stop:
        for target in ("@SECRET@", "own"):
            try:
                os.unlink("swapped")
            except OSError:
                pass
            try:
                os.symlink(target, "swapped")
            except OSError:
                pass
open("own", "w").write("own")
threading.Thread(target=swap).start()
seen = set()
while time.monotonic() < stop:
    try:
        seen.add(open("swapped").read())
    except OSError:
        pass
if seen - {"own"}: print("ESCAPED", seen)
""",
    ),
    Script(
        "many timers, pipes and pollers",
        """
import select, socket
kept = []
for make in (os.pipe, socket.socketpair, select.epoll, lambda: os.eventfd(0), lambda: open("f", "w")):
    try:
        for _ in range(1000): kept.append(make())
    except OSError as error:
        print("held", len(kept))
if len(kept) > 64: print("ESCAPED", len(kept))
timer = ctypes.c_void_p()
n = sum(libc.timer_create(1, None, ctypes.byref(timer)) == 0 for _ in range(2000))
if n > 0: print("ESCAPED", n)
""",
    ),
    may_end(
        "more memory than its address space",
        """
import mmap
page = mmap.mmap(-1, 1 << 20)
size = 0
try:
    while True:
        f = open("m%d" % size, "wb+")
        f.truncate(8 << 20)
        m = mmap.mmap(f.fileno(), 8 << 20)
        m.write(b"x" * (8 << 20))
        m.close()
        size += 8
except (OSError, ValueError, SystemError) as error:
    print("held", size)
if size > 64: print("ESCAPED", size)
""",
        "crash",
        "memory",
        "output",
    ),
]
