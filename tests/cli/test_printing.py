"""What others wrote is made visible before it reaches a terminal, and forges no line."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shared.errors import Unavailable
from shared.process.telemetry import _JsonLines
from shared.run.folder import RunFolder
from shared.visible import visible, visible_json
from tests.support import small_run
from volley.__main__ import main
from volley.printing import complain, format_json, print_block, print_lines
from volley_dashboard.terminal.live import LiveDisplay
from volley_proof.verify import command
from volley_proof.verify.violation import Violation, ViolationKind
from volley_sandbox.commands import environments

HOSTILE = "a\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\u2066\u2028\u2029\x85\x7f\nproven\n\udc80\U000e0041[red]b[/red]$x_$"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


@given(st.text() | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs"])))
def test_visible_text_is_one_line_without_controls_and_stays_so(text: str) -> None:
    shown = visible(text)
    assert not FORBIDDEN.search(shown)
    assert shown.splitlines() in ([], [shown])
    assert not {unicodedata.bidirectional(c) for c in shown} & {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI"}
    assert visible(shown) == shown


def test_text_of_every_language_stays_as_it_is() -> None:
    text = "Größe → 模型 🏆 עברית\tعربى é"
    assert visible(text) == text


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_json_for_programs_has_the_same_value_and_no_controls(value: Any) -> None:
    text = format_json(value)
    assert not FORBIDDEN.search(text)
    assert orjson.loads(text) == value
    assert visible_json(text) == text


def test_json_of_a_name_that_is_no_text() -> None:
    text = format_json({"file": "\udc80\x9b", "loss": float("nan")})
    assert not FORBIDDEN.search(text)
    assert json.loads(text, parse_constant=pytest.fail) == {"file": "\udc80\x9b", "loss": None}


def test_every_printer_makes_its_text_visible(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(HOSTILE, "second")
    print_block(f"table\n{HOSTILE}")
    complain(HOSTILE)
    shown = capsys.readouterr()
    assert not FORBIDDEN.search(shown.out + shown.err)
    assert len(shown.err.splitlines()) == 1
    assert shown.out.startswith("a\\x1b[2J")


def test_a_violation_forges_no_line_of_the_proof() -> None:
    result = command._refused(Violation(ViolationKind.FOLDER, HOSTILE, file=HOSTILE))
    lines = command.format_result(result).split("\n")
    assert not any(line.startswith("proven") for line in lines)
    assert lines[-1].startswith("NOT PROVEN")
    assert not any(map(FORBIDDEN.search, lines))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / small_run.RUN)


@pytest.mark.parametrize("arguments", [("verify",), ("verify", "--json"), ("report",), ("status",), ("compare",)])
def test_a_folder_whose_texts_are_hostile_reaches_no_terminal_raw(
    valid: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    hostile = HOSTILE.replace("\udc80", "")
    folder = RunFolder(tmp_path / "r\x1b[2J\nproven\n\u202e")
    shutil.copytree(valid, folder.path)
    (folder.checkpoints / "e000002-s000005" / f"{hostile.replace(chr(47), chr(45))}.txt").write_bytes(b"")
    tree = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    tree["data"]["env"] = hostile
    folder.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    lines = folder.metrics.read_bytes().splitlines()
    row = orjson.loads(lines[-1]) | {f"env/{hostile}/{key}": 1.0 for key in ("reward_mean", "success", "groups")}
    folder.metrics.write_bytes(b"\n".join([*lines[:-1], orjson.dumps(row)]) + b"\n")
    given = [arguments[0], *[str(folder.path)] * (1 + (arguments[0] == "compare")), *arguments[1:]]
    given += ["--plot", str(tmp_path / "plot.png")] if arguments[0] == "compare" else []
    with pytest.raises(SystemExit):
        main(given)
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert not FORBIDDEN.search(shown.out + shown.err)
    assert not any(line.startswith("proven") for line in shown.out.splitlines())
    assert not recwarn.list


class HostileClient:
    """An environment service whose every text is hostile."""

    async def __aenter__(self) -> HostileClient:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def submit(self, body: object, *, replace: bool) -> dict[str, Any]:
        return self.row()

    async def environments(self) -> dict[str, Any]:
        return {"environments": [self.row()]}

    async def versions(self, name: str) -> list[dict[str, Any]]:
        return [self.row()]

    async def log(self, name: str) -> str:
        return HOSTILE

    async def retire(self, name: str) -> dict[str, Any]:
        raise Unavailable(HOSTILE, HOSTILE)

    def row(self) -> dict[str, Any]:
        check = {"ok": False, "name": HOSTILE, "detail": HOSTILE, "hint": HOSTILE}
        return {
            **dict.fromkeys(("name", "base", "state", "why", "description", "trouble"), HOSTILE),
            "weight": 1.0,
            "size": 1,
            "splits": {HOSTILE: 1},
            "failures": [],
            "history": [{"at": 0, "state": HOSTILE, "why": HOSTILE}],
            "report": {"checks": [check], "warnings": [HOSTILE], "log": HOSTILE},
        }


class HostileTarget(environments.EnvTarget):
    def client(self) -> Any:
        return HostileClient()


def test_an_environments_own_texts_reach_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    target = HostileTarget()
    environments.listed(target)
    environments.show(target, "x")
    environments.logs(target, "x")
    asyncio.run(environments._submit(target, {"name": "x"}, False, True))
    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown
    assert not FORBIDDEN.search(shown)


def test_the_live_display_shows_no_controls_and_takes_no_markup() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, highlight=False, emoji=False, markup=False, width=200)
    with LiveDisplay.opened(1, console) as display:
        display.say(HOSTILE)
        display.quiet(HOSTILE)
        display.refresh()
    text = out.getvalue().replace("\x1b[?25h", "")
    assert not FORBIDDEN.search(text)
    assert "[red]b[/red]$x_$" in text


def test_a_line_of_a_log_holds_no_controls(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    record = logging.LogRecord("volley", logging.INFO, "", 0, HOSTILE.replace("\udc80", ""), None, None)
    line = _JsonLines("env").format(record)
    assert not FORBIDDEN.search(line)
    assert orjson.loads(line)["event"] == HOSTILE.replace("\udc80", "")
