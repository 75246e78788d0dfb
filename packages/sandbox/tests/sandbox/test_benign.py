"""What ordinary programs need works in a sandbox, on every tier."""

from __future__ import annotations

import pytest

from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import ScriptProgram
from volley_sandbox.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAMS = {
    "event loop": """
import asyncio
async def main():
    server = asyncio.Queue()
    async with asyncio.timeout(30):
        await asyncio.gather(server.put(1), server.get(), asyncio.sleep(0.01), asyncio.to_thread(sum, [1, 2]))
asyncio.run(main())
""",
    "threads": """
import threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda x: x * x, range(100))) == [x * x for x in range(100)]
    assert threading.active_count() > 1
""",
    "database": """
import sqlite3
for place in (":memory:", "file.db"):
    with sqlite3.connect(place) as base:
        base.execute("create table t (x)")
        base.executemany("insert into t values (?)", [(i,) for i in range(1000)])
        assert base.execute("select sum(x) from t").fetchone() == (499500,)
""",
    "files": """
import os, pathlib, shutil, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+") as file:
    file.write("x" * 100_000)
    file.seek(0)
    assert len(file.read()) == 100_000
    path = pathlib.Path(folder, "a", "b")
    path.parent.mkdir()
    path.write_text("text")
    shutil.copyfile(path, path.with_name("c"))
    shutil.copyfile(path, pathlib.Path(folder, "first"))
    os.rename(pathlib.Path(folder, "first"), pathlib.Path(folder, "moved"))
    os.symlink("moved", pathlib.Path(folder, "link"))
    assert pathlib.Path(folder, "link").read_text() == "text"
    with zipfile.ZipFile(pathlib.Path(folder, "z.zip"), "w") as archive:
        archive.write(pathlib.Path(folder, "moved"), "name")
    assert sorted(os.listdir(folder)) == ["a", "link", "moved", "z.zip"]
pathlib.Path("here").write_text("x")
assert pathlib.Path.home() == pathlib.Path.cwd() == pathlib.Path(tempfile.gettempdir())
""",
    "standard library": """
import bz2, collections, csv, ctypes, dataclasses, datetime, decimal, email, enum, fractions, functools, hashlib, heapq
import html, itertools, json, logging, lzma, math, operator, queue, random, re, secrets, ssl, statistics, string
import struct, textwrap, time, tomllib, typing, unicodedata, unittest, urllib.parse, uuid, xml.etree.ElementTree, zlib
import zoneinfo
assert len(secrets.token_bytes(8)) == 8
assert uuid.uuid4() != uuid.uuid4()
assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
assert datetime.datetime.now(datetime.timezone.utc).year > 2000
assert time.localtime().tm_zone == "UTC"
""",
    "tests": """
import io, unittest
class Test(unittest.TestCase):
    def test_it(self):
        self.assertEqual(1 + 1, 2)
result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Test))
assert result.wasSuccessful() and result.testsRun == 1
""",
    "signals and timers": """
import os, signal, time
rung = []
signal.signal(signal.SIGALRM, lambda *a: rung.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not rung: time.sleep(0.001)
""",
    "classes": """
import dataclasses, enum, pickle, typing
@dataclasses.dataclass
class Point:
    x: int
    y: "typing.Optional[int]" = None
assert typing.get_type_hints(Point)["x"] is int
assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
class Colour(enum.Enum):
    RED = 1
assert __name__ == "__main__"
""",
    "memory below the limit": """
x = bytearray(200 << 20)
x[::4096] = b"y" * len(x[::4096])
""",
    "a mapped file": """
import mmap
with open("m", "wb+") as file:
    file.write(b"x" * 8192)
    file.flush()
    with mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] = 65
    file.seek(0)
    assert file.read(1) == b"A"
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_works(name: str, sandboxes: Sandboxes):
    sandbox = await sandboxes.start(ScriptProgram())
    said = await sandbox.call("run", {"source": PROGRAMS[name], "stdin": "", "max_output": 10_000}, 60)
    await sandbox.close()
    assert answers.read_script(said) == answers.ScriptResult("", "", 0, False)
