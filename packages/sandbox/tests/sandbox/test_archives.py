"""Submitted archives: what may be in them, what may not, and how much."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from shared.errors import DecodeError, InputError, TooLarge
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import EnvironmentProgram
from volley_sandbox.sandbox.packages.archives import ArchiveLimits, unpack
from volley_sandbox.sandbox.sandboxes import Sandboxes

ENVIRONMENT = """
from .rules import GREETING

class Echo:
    splits = {"train": 3}
    def reset(self, split, index, seed):
        return GREETING
    def step(self, text):
        return text, 1.0, True, False, {}
"""


def packed(files: dict[str, str | bytes], modes: dict[str, int] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (modes or {}).get(name, 0o644) << 16
            archive.writestr(info, content)
    return out.getvalue()


def renamed(old: str, new: str, content: str = "x") -> bytes:
    """An archive with a name that zipfile would not write."""
    assert len(old) == len(new)
    return packed({old: content}).replace(old.encode(), new.encode())


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def test_a_package_that_is_submitted_is_played(tmp_path: Path):
    found = unpack(packed({"echo/__init__.py": ENVIRONMENT, "echo/rules.py": "GREETING = 'hi'"}), tmp_path / "store")
    assert found.modules == ("echo",)
    module, entry = found.locate(None)
    async with Sandboxes() as sandboxes:
        program = EnvironmentProgram(None, module=module, entry=entry, folders=(found.folder,))
        sandbox = await sandboxes.start(program)
        opened = answers.read_opening(await sandbox.call("reset", {"split": "train", "index": 0, "seed": 0}, 30))
        assert opened.messages[0]["content"] == "hi"


def test_the_same_bytes_again_change_nothing(tmp_path: Path):
    data = packed({"a.py": "x = 1", "folder/": "", "folder/b.txt": "b"})
    assert unpack(data, tmp_path) == unpack(data, tmp_path)
    (place,) = tmp_path.iterdir()
    assert everything_below(place) == ["a.py", "folder", "folder/b.txt"]
    assert stat.S_IMODE((place / "a.py").stat().st_mode) == 0o644


def test_others_may_read_it_whatever_the_service_s_mask_is(tmp_path: Path):
    mask = os.umask(0o077)
    try:
        found = unpack(packed({"a/b/c.py": ""}, {"a/b/c.py": 0o7777}), tmp_path)
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in [found.folder, *found.folder.rglob("*")]} == {0o755}


HOSTILE = {
    "slip": packed({"../evil.py": "x"}),
    "slip in the middle": packed({"a/../../evil.py": "x"}),
    "absolute": packed({"/etc/evil": "x"}),
    "backslashes": renamed("a/b/c.py", "a\\..\\c.p"),
    "drive": packed({"c:evil.py": "x"}),
    "null byte": renamed("evil!.py", "evil\0.py"),
    "new line": packed({"a\nb.py": "x"}),
    "right to left": packed({"a\u202eyp.exe": "x"}),
    "dot": packed({"./a.py": "x"}),
    "empty part": packed({"a//b.py": "x"}),
    "trailing dot": packed({"a./b.py": "x"}),
    "trailing space": packed({"a /b.py": "x"}),
    "too deep": packed({"/".join("d" * 40): "x"}),
    "long name": packed({"x" * 300: "x"}),
    "no name": packed({"": "x"}),
    "symbolic link": packed({"link": "/etc/passwd"}, {"link": stat.S_IFLNK | 0o777}),
    "device": packed({"disk": ""}, {"disk": stat.S_IFBLK | 0o666}),
    "pipe": packed({"pipe": ""}, {"pipe": stat.S_IFIFO | 0o666}),
    "case": packed({"Evil.py": "1", "evil.py": "2"}),
    "composed": packed({"\u00e9.py": "1", "e\u0301.py": "2"}),
    "wide letters": packed({"a.py": "1", "\uff41.py": "2"}),
    "file and folder": packed({"a": "1", "a/b.py": "2"}),
    "folder and file": packed({"a/b.py": "2", "A": "1"}),
    "through a link": packed({"d": "/tmp", "d/evil": "x"}, {"d": stat.S_IFLNK | 0o777}),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_may_not_be_in_an_archive(name: str, tmp_path: Path):
    folder = tmp_path / "deep" / "store"
    with pytest.raises((InputError, DecodeError)):
        unpack(HOSTILE[name], folder)
    assert everything_below(tmp_path) == ["deep", "deep/store"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_same_name_twice(tmp_path: Path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.py", "1")
        archive.writestr("a.py", "2")
    with pytest.raises(InputError, match="twice"):
        unpack(out.getvalue(), tmp_path)


def test_bombs(tmp_path: Path):
    limits = ArchiveLimits(entries=10, file_mb=1, total_mb=2)
    with pytest.raises(TooLarge, match="too large when it is unpacked"):
        unpack(packed({"a": bytes(2 << 20)}), tmp_path, limits)
    with pytest.raises(TooLarge, match="too large when it is unpacked"):
        unpack(packed({f"f{i}": bytes(900_000) for i in range(4)}), tmp_path, limits)
    with pytest.raises(TooLarge, match="more than 10 entries"):
        unpack(packed({f"f{i}": "" for i in range(11)}), tmp_path, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_lies(tmp_path: Path):
    data = bytearray(packed({"a": bytes(4 << 20)}))
    at = data.rindex(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 10)
    with pytest.raises((DecodeError, TooLarge)):
        unpack(bytes(data), tmp_path, ArchiveLimits(file_mb=1))
    assert list(tmp_path.iterdir()) == []


def test_an_encrypted_entry(tmp_path: Path):
    data = bytearray(packed({"a.py": "x"}))
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.index(mark) + offset] |= 1
    with pytest.raises(InputError, match="encrypted"):
        unpack(bytes(data), tmp_path)


def test_bytes_that_are_no_archive(tmp_path: Path):
    generator = random.Random(0)
    good = packed({"a.py": "x" * 1000, "b/c.py": "y = 1"})
    broken = [b"", b"PK", b"x" * 1000, good[:-10], good[: len(good) // 2], b"PK\x05\x06" + bytes(18)]
    for _ in range(400):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        broken.append(bytes(data))
    kept = 0
    for data in broken:
        try:
            unpack(data, tmp_path)
            kept += 1
        except InputError:
            pass
    assert kept < 300
    assert all(len(path.name) == 32 for path in tmp_path.iterdir())


WHEEL = {
    "echo/__init__.py": ENVIRONMENT,
    "other.py": "",
    "echo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
    "echo-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: echo\nVersion: 1.0\nRequires-Python: >=3.11\nRequires-Dist: numpy>=2\n"
        "Requires-Dist: pytest ; extra == 'test'\n\nA text\nRequires-Dist: not this\n"
    ),
    "echo-1.0.dist-info/entry_points.txt": "[volley.environments]\necho = echo:Echo\n[console_scripts]\nx = y:z\n",
}


def test_a_wheel(tmp_path: Path):
    found = unpack(packed(WHEEL), tmp_path)
    assert found.modules == ("echo", "other")
    assert found.requirements == ("numpy>=2",)
    assert found.requires_python == ">=3.11"
    assert found.entries == ("echo:Echo",)
    assert found.locate(None) == ("echo", "Echo")
    assert found.locate("other:Thing") == ("other", "Thing")


def test_a_wheel_with_compiled_code(tmp_path: Path):
    with pytest.raises(InputError, match="pure Python"):
        unpack(packed({**WHEEL, "echo-1.0.dist-info/WHEEL": "Root-Is-Purelib: false"}), tmp_path)


def test_a_project(tmp_path: Path):
    project = '[project]\nname="x"\ndependencies=["a>1"]\nrequires-python=">=3.12"\n'
    project += '[project.entry-points."volley.environments"]\ne="echo.game:Echo"\n'
    found = unpack(packed({"pyproject.toml": project, "src/echo/__init__.py": "", "src/echo/game.py": ""}), tmp_path)
    assert found.folder.name == "src"
    assert (found.requirements, found.requires_python, found.entries) == (("a>1",), ">=3.12", ("echo.game:Echo",))
    with pytest.raises(InputError, match="must be tables"):
        unpack(packed({"pyproject.toml": "project = 3"}), tmp_path)
    with pytest.raises(InputError, match="more than 100 dots"):  # the time would be their square
        unpack(packed({"pyproject.toml": f"{'.'.join('a' * 20_000)} = 1"}), tmp_path)
    with pytest.raises(InputError, match="must be texts"):
        unpack(packed({"pyproject.toml": "[project]\ndependencies = [1]"}), tmp_path)


def test_a_single_file_with_a_block(tmp_path: Path):
    found = unpack(packed({"only.py": '# /// script\n# dependencies = ["a"]\n# ///\n', "data.json": "{}"}), tmp_path)
    assert (found.modules, found.requirements) == (("only",), ("a",))
    assert found.locate("Game") == ("only", "Game")


def test_which_module_to_use(tmp_path: Path):
    found = unpack(packed({"a.py": "", "b.py": ""}), tmp_path)
    with pytest.raises(InputError, match="holds a, b"):
        found.locate(None)
    with pytest.raises(InputError, match="not the name of a module"):
        found.locate("../x:Y")
    plays = (
        "{}class {}(Base):\n    @x\n    def reset(self): ...\n\n    # by then\n    async def judge(self, output): ...\n"
    )
    block = '# /// script\n# dependencies = ["a"]\n# ///\n'
    found = unpack(
        packed({"a.py": plays.format(block, "Fruit"), "b.py": "class Shop:\n    def step(self): ..."}), tmp_path
    )
    assert (found.locate(None), found.locate("Fruit"), found.requirements) == (("a", "Fruit"), ("a", "Fruit"), ("a",))
    inherits = {"a.py": plays.format("", "Fruit"), "b.py": "from a import Fruit\nclass Big(Fruit):\n    splits = {}\n"}
    assert unpack(packed(inherits), tmp_path).entries == ("a:Fruit", "b:Big")
    found = unpack(packed({"a.py": plays.format("", "A"), "b/__init__.py": plays.format("", "B")}), tmp_path)
    assert found.locate("B") == ("b", "B")
    with pytest.raises(InputError, match="holds a:A, b:B; which class is the environment") as error:
        found.locate(None)
    assert "--entry a:A of `volley env`" in error.value.hint
    with pytest.raises(InputError, match="no module at all"):
        unpack(packed({"readme.txt": ""}), tmp_path).locate(None)


@pytest.mark.parametrize(
    ("files", "inside"),
    [
        ({"mine/game.py": "x = 1", "mine/rows.jsonl": "{}"}, "mine"),
        ({"mine/pyproject.toml": "[project]", "mine/src/game.py": "x = 1"}, "mine/src"),
        ({"mine/__init__.py": "", "mine/game.py": "x = 1"}, "."),
        ({"mine/game.py": "x = 1", "other.py": ""}, "."),
        ({"mine/inner/game.py": "x = 1"}, "."),
    ],
)
def test_one_folder_around_everything_is_left_out(files: dict[str, str | bytes], inside: str, tmp_path: Path) -> None:
    found = unpack(packed(files), tmp_path)
    assert found.folder.relative_to(next(tmp_path.iterdir())) == Path(inside)
    if inside != ".":
        assert found.modules == ("game",)
