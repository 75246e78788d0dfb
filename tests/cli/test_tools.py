"""Tools for developers: what their command lines refuse, and that `make` runs each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

import pytest

from tools.bench.__main__ import main as bench
from tools.chaos.__main__ import main as chaos
from tools.soak.__main__ import main as soak
from volley.__main__ import parser
from volley.layout import PROJECT

type Tool = Callable[[list[str]], None]


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        (soak, ["--minutes", "0"], "too short"),
        (soak, ["--minutes", "1", "--json", "run.nam=x"], "unknown key run.nam"),
        (bench, ["warp"], "no benchmark warp"),
        (bench, ["--json", "bench.json", "warp"], "no benchmark warp"),
        (chaos, ["--real", "--minutes", "0"], "--minutes 0"),
    ],
)
def test_a_mistake_is_one_line(
    tool: Tool, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(SystemExit) as ended:
        tool(arguments)
    assert ended.value.code == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") <= 2  # the error and its hint
    assert shown.err.startswith("volley: ")
    assert named in shown.err


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        *((chaos, [f"--{amount}", "-1"]) for amount in ("kills", "wipes", "zombies")),
        (chaos, ["--real", "--minutes", "nan"]),
        (soak, ["--minutes", "nan"]),
        (soak, ["--minutes", "inf"]),
    ],
)
def test_a_number_out_of_range_is_refused(tool: Tool, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}: '{arguments[-1]}' is not a" in capsys.readouterr().err


def test_tools_are_targets_of_make_and_no_part_of_the_package() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"-m tools\.(\w+)", makefile)
    assert {"bench", "chaos", "soak", "lower", "testing"} <= set(targets)
    assert all(
        (PROJECT / "tools" / name).with_suffix(".py").exists() or (PROJECT / "tools" / name).is_dir()
        for name in targets
    )
    assert not {"bench", "chaos", "soak"} & set(parser().format_help().split())
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["services", "shared", "volley"]
