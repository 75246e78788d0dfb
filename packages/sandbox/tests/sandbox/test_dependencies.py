"""Dependencies of submitted files: read from PEP 723 blocks, installed by the real uv from an index of our own."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.sandbox.tests.sandbox.packages import package_index, wheel
from shared.errors import InputError, TooLarge, Unavailable
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import ScriptProgram
from volley_sandbox.sandbox.packages.dependencies import (
    DependencyStore,
    InstallLimits,
    check_python,
    check_requirement,
    read_metadata,
)
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.sandbox.tier import RESTRICTED

PACKAGES = {
    "greeting-1.0-py3-none-any.whl": wheel(
        "greeting",
        "1.0",
        {
            "greeting.py": "import helper\nTEXT = 'hello ' + helper.NAME\n",
            "greeting-1.0.data/scripts/run": "#!python\n",
        },
        "Requires-Dist: helper>=2\n",
    ),
    "helper-2.1-py3-none-any.whl": wheel("helper", "2.1", {"helper/__init__.py": "NAME = 'world'\n"}),
    "huge-1.0-py3-none-any.whl": wheel("huge", "1.0", {"huge.bin": bytes(8 << 20)}),
    "elsewhere-1.0-py3-none-any.whl": wheel(
        "elsewhere", "1.0", {"elsewhere.py": ""}, "Requires-Dist: helper @ https://example.invalid/helper-2.1.zip\n"
    ),
    "source-1.0.tar.gz": b"not even looked at",
}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a package index."""
    with package_index(tmp_path_factory.mktemp("index"), PACKAGES) as url:
        yield url


SCRIPT = """
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "greeting>=1",  # with a comment
# ]
# [tool.uv]
# index-url = "https://example.invalid"
# ///
import greeting
"""


def test_the_block_of_a_file():
    found = read_metadata(SCRIPT)
    assert found.dependencies == ("greeting>=1",)
    assert found.requires_python == ">=3.10"
    assert read_metadata("import os").dependencies == ()


def test_the_block_of_a_file_of_windows():
    assert read_metadata(SCRIPT.replace("\n", "\r\n")) == read_metadata(SCRIPT)


PEP_723 = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""As PEP 723 has it."""
LINES = ["# /// script", "# /// other", "# ///", "#", "# requires-python = '>=3'", "#no", "x = 1", "", " # ///"]


@given(st.lists(st.sampled_from(LINES), max_size=9))
def test_blocks_are_those_of_pep_723(lines: list[str]):
    text = "\n".join(lines)
    wanted = [match["content"] for match in PEP_723.finditer(text) if match["type"] == "script"]
    try:
        toml = [tomllib.loads("\n".join(line[2:] for line in one.splitlines())) for one in wanted]
    except tomllib.TOMLDecodeError:
        toml = None
    if toml is None or len(toml) > 1:
        with pytest.raises(InputError):
            read_metadata(text)
    else:
        assert read_metadata(text).requires_python == (toml[0].get("requires-python", "") if toml else "")


def test_blocks_that_nobody_closes_take_the_time_of_their_length():
    """With the expression of PEP 723 this would take an hour."""
    assert read_metadata("# /// script\n" * 2**17) == read_metadata("")


@pytest.mark.parametrize(
    ("block", "match"),
    [
        ("dependencies = [", "is not TOML"),
        ("dependencies = 'numpy'", "must be a list of texts"),
        ("dependencies = [1]", "must be a list of texts"),
        ("requires-python = 3", "must be a text"),
        ("x = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_block_that_is_wrong(block: str, match: str):
    with pytest.raises(InputError, match=match):
        read_metadata(f"# /// script\n# {block}\n# ///\n")


def test_two_blocks():
    with pytest.raises(InputError, match="more than one"):
        read_metadata("# /// script\n# dependencies = []\n# ///\n\n" * 2)


def test_the_python_a_file_wants():
    check_python(">=3.10", (3, 12, 1))
    check_python("", (3, 12, 1))
    with pytest.raises(InputError, match=r"requires Python >=3.13; sandboxes have 3.12.1"):
        check_python(">=3.13", (3, 12, 1))
    with pytest.raises(InputError, match="not a version specifier"):
        check_python(">=" + "9" * 5000, (3, 12, 1))
    with pytest.raises(InputError, match="not a version specifier"):
        check_python("three")


def test_requirements_in_their_normal_form():
    assert check_requirement("Num_Py >= 2, <3") == "num-py<3,>=2"
    assert check_requirement("a[z,y]; python_version>'3'") == 'a[y,z] ; python_version > "3"'


@pytest.mark.parametrize(
    "text",
    [
        "helper @ https://example.invalid/x.whl",
        "helper @ file:///etc/passwd",
        "git+https://example.invalid/x",
        "https://example.invalid/x.whl",
        "./helper",
        "../x.whl",
        "/etc/passwd",
        "-r /etc/passwd",
        "--index-url=https://example.invalid",
        "-e .",
        "helper --hash=sha256:0",
        "helper\n--index-url https://example.invalid",
        "helper; import os",
        "${HOME}",
        "",
        "x" * 301,
    ],
)
def test_requirements_that_are_refused(text: str):
    with pytest.raises(InputError):
        check_requirement(text)


async def test_what_is_installed_can_be_imported(index: str, tmp_path: Path):
    store = DependencyStore(tmp_path / "store", index)
    mask = os.umask(0o077)
    try:
        (folder,) = await store.install(read_metadata(SCRIPT).dependencies)
        assert await store.install(["Greeting >= 1"]) == (folder,)
        assert not (folder / "bin").exists()
        assert names_in(tmp_path / "store") == [folder.name]
        for namespaces in (True, False):
            async with Sandboxes(namespaces=namespaces) as sandboxes:
                if (await sandboxes.probe()).level < RESTRICTED:
                    pytest.skip("this machine cannot confine anything")
                sandbox = await sandboxes.start(ScriptProgram(folders=(folder,)))
                source = "import greeting, os\nprint(greeting.TEXT)\nopen(greeting.__file__, 'a')"
                said = await sandbox.call("run", {"source": source, "stdin": "", "max_output": 1000}, 30)
                result = answers.read_script(said)
                assert result.stdout == "hello world\n"
                assert "OSError" in result.stderr or "PermissionError" in result.stderr
                other = await sandboxes.start(ScriptProgram())
                source = f"import os\nprint(os.path.isdir({str(folder)!r}) and os.listdir({str(folder)!r}))"
                said = await other.call("run", {"source": source, "stdin": "", "max_output": 1000}, 30)
                assert "greeting" not in answers.read_script(said).stdout
    finally:
        os.umask(mask)


@pytest.mark.parametrize(
    ("requirement", "match"),
    [
        ("nowhere", "nowhere cannot be installed"),
        ("helper>=3", "helper>=3 cannot be installed"),
        ("source", "source cannot be installed"),
        ("elsewhere", "elsewhere cannot be installed"),
    ],
)
async def test_what_cannot_be_installed(index: str, tmp_path: Path, requirement: str, match: str):
    with pytest.raises(InputError, match=match):
        await DependencyStore(tmp_path, index).install([requirement])
    assert names_in(tmp_path) == []


async def test_nothing_is_required(tmp_path: Path):
    assert await DependencyStore(tmp_path / "store").install([]) == ()


async def test_too_many_and_too_large(index: str, tmp_path: Path):
    store = DependencyStore(tmp_path, index, InstallLimits(disk_mb=4, requirements=2))
    with pytest.raises(InputError, match="3 requirements"):
        await store.install(["a", "b", "c"])
    with pytest.raises(TooLarge, match="more than 4 MiB"):
        await store.install(["huge"])
    assert names_in(tmp_path) == []


async def test_an_index_that_is_away(tmp_path: Path):
    with pytest.raises(Unavailable, match=r"cannot be reached|took longer"):
        await DependencyStore(tmp_path, "http://127.0.0.1:9/simple", InstallLimits(timeout_s=5)).install(["helper"])
    assert names_in(tmp_path) == []
