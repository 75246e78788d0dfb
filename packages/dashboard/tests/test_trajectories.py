"""`volley trajectories`: lists, filters, whole episodes and exports of a run's archive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from shared.errors import ConfigError
from shared.run import archive
from shared.run.folder import RunFolder
from shared.teacher_view import TeacherPrompt, TeacherView
from shared.types import Group, Turn, WeightVersion
from tests.support import small_run
from tests.support.disk import file_size_limit
from tests.support.foreign import environment
from volley.__main__ import main
from volley.layout import PROJECT
from volley_dashboard.trajectories import episodes, files

HOSTILE = "a\x1b[2J\x07\r\n\u202e\x00\u2066z"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("made") / small_run.RUN)


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("volley_dashboard.trajectories.index.CACHE", tmp_path / "cache")
    return Path(shutil.copytree(made, tmp_path / "run"))


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trajectories", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, _ = called(capsys, *arguments, "--json")
    assert code == 0, out
    return orjson.loads(out)


def hostile(run: Path, text: str = HOSTILE) -> None:
    """Put a text into every field of the newest step that holds text."""
    folder, version = RunFolder(run), WeightVersion(2, 5)
    groups = [Group.decode(one) for one in archive.read(folder.archive, "r", version)]
    archive.path_of(folder.archive, version).unlink()
    changed = [
        replace(
            group,
            env=text,
            task=text,
            trajectories=tuple(
                replace(
                    one,
                    env=text,
                    task=text,
                    turns=(Turn(0, 3, text), Turn(3, 9, "assistant", 1.0)),
                    reward_components={text: 1.0},
                    failures={text: 2},
                )
                for one in group.trajectories
            ),
        )
        for group in groups
    ]
    archive.Archive(folder.archive, "r").write(version, [one.encode() for one in changed])


@pytest.mark.parametrize(
    ("filters", "n"),
    [
        ((), 20),
        (("--step-min", "2", "--step-max", "3"), 8),
        (("--reward-min", "1"), 10),
        (("--no-success", "--reward-max", "0.5"), 10),
        (("--task", "train/7"), 2),
        (("--env", "toy", "--tokens-min", "10"), 10),
        (("--staleness-max", "0"), 12),
        (("--failed",), 0),
        (("--text", "TRAIN/1", "--sort", "reward"), 8),
    ],
)
def test_episodes_are_filtered(run: Path, filters: tuple[str, ...], n: int, capsys: pytest.CaptureFixture[str]) -> None:
    value = found(capsys, run, "--limit", "0", *filters)
    assert (value["total"], len(value["rows"]), value["damaged"]) == (n, n, {})


@pytest.mark.parametrize("text", ["straße/ÜBUNG", "STRASSE", "übung"])
def test_text_is_found_in_any_case(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(run, "Straße/Übung")
    assert found(capsys, run, "--text", text)["total"] == 4


def test_the_list_is_cut_and_sorted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(capsys, run, "--limit", "3", "--sort", "reward", "--descending")["rows"]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 1.0]
    code, out, err = called(capsys, run, "--limit", "3")
    assert (code, err, len(out.splitlines())) == (0, "", 5)
    assert "3 of 20 episodes; --limit 0 lists all; --show " in out
    assert "  tokens with prompt  turns  " in out


def test_an_episode_is_shown_in_full(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(run)
    row = found(capsys, run, "--failure", HOSTILE)["rows"][0]
    code, out, _ = called(capsys, run, "--show", f"{row['ticket']}.{row['sample']}")
    assert code == 0
    assert "reward 1" in out
    (one,) = found(capsys, run, "--show", f"{row['ticket']}.{row['sample']}")["trajectories"]
    assert (one["reward"], one["failures"]) == (row["reward"], {HOSTILE: 2})


def test_hostile_text_reaches_no_terminal_raw(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(run)
    ticket = found(capsys, run, "--step-min", "5")["rows"][0]["ticket"]
    for arguments in ((), ("--show", ticket), ("--json",), ("--show", ticket, "--json")):
        _, out, err = called(capsys, run, *arguments)
        assert out
        assert not FORBIDDEN.search(out + err)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--step-min", "x"), 2, "step_min='x'"),
        (("--reward-min", "nan"), 2, "reward_min"),
        (("--limit", "-1"), 2, "--limit"),
        (("--show", "x"), 2, "--show x"),
        (("--show", "99999"), 1, "ticket 99999"),
        (("--show", f"{10**30}"), 1, f"ticket {10**30}"),
        (("--show", "7.7"), 1, "no sample 7"),
        (("--tokens",), 2, "--export"),
        (("--export", "episodes.txt"), 2, "episodes.txt"),
        (("--export", "nowhere/episodes.jsonl"), 2, "nowhere"),
    ],
)
def test_wrong_arguments_are_named(
    run: Path, arguments: tuple[str, ...], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, out, err = called(capsys, run, *arguments)
    assert (ended, out) == (code, "")
    assert named in err
    assert err.count("\n") in (1, 2)  # with a hint


def test_damaged_files_are_named_and_the_others_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = sorted(RunFolder(run).archive.glob("e*/*.zst"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    code, out, err = called(capsys, run, "--limit", "0")
    assert (code, len(out.splitlines())) == (0, 18)
    assert "e000002-s000005" in err


def test_a_running_run_shows_its_new_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = archive.path_of(RunFolder(run).archive, WeightVersion(2, 5))
    content = newest.read_bytes()
    newest.unlink()
    assert found(capsys, run)["total"] == 16
    newest.write_bytes(content)
    assert found(capsys, run)["total"] == 20


def test_steps_whose_files_are_gone_are_forgotten(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(capsys, run)["total"] == 20
    archive.path_of(RunFolder(run).archive, WeightVersion(2, 5)).unlink()
    assert found(capsys, run, "--export", tmp_path / "e.jsonl")["episodes"] == 16


def test_only_regular_files_are_replaced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "e.jsonl"
    os.mkfifo(pipe)
    code, _, err = called(capsys, run, "--export", pipe)
    assert (code, pipe.is_fifo()) == (2, True)
    assert str(pipe) in err


def test_exported_lines_hold_turns_and_tokens(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(run)
    path = tmp_path / "out.jsonl"
    value = found(capsys, run, "--step-min", "5", "--export", path, "--tokens")
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert (value["episodes"], len(lines)) == (4, 4)
    for line in lines:
        assert [turn["role"] for turn in line["turns"]] == [HOSTILE, "assistant"] or line["sample"]
        own = line["sequences"][0]
        assert len(own["token_ids"]) == len(own["loss_mask"]) == len(own["logprobs"]) == 9
    assert [line["sample"] for line in lines] == [0, 1, 0, 1]


def test_a_full_disk_leaves_no_part_of_an_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    found(capsys, run)
    with file_size_limit(100):
        code, out, err = called(capsys, run, "--export", tmp_path / "out" / "e.jsonl")
    assert (code, out) == (1, "")
    assert str(tmp_path / "out") in err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_reader_of_a_pipe_may_leave(run: Path) -> None:
    command = f"{sys.executable} -m volley trajectories {run} --limit 0 | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, capture_output=True, encoding="utf-8", check=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_an_output_that_cannot_be_written_is_one_line(run: Path) -> None:
    for option in ("", "--json"):
        command = f"{sys.executable} -m volley trajectories {run} --limit 0 {option} > /dev/full"
        done = subprocess.run(["bash", "-c", command], cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("volley: standard output: ")
        assert done.stderr.count("\n") in (1, 2)


def test_parquet_names_the_missing_package(tmp_path: Path) -> None:
    if files.has_parquet():
        pytest.skip("pyarrow is installed")
    with pytest.raises(ConfigError, match="pyarrow"):
        files.check(tmp_path / "out.parquet")


_PARQUET = """
import pathlib, sys
import pandas, polars
from volley_dashboard.trajectories import episodes, files
from volley_dashboard.trajectories.archived import ArchivedEpisodes
from volley_dashboard.trajectories.index import Filters
run, out = map(pathlib.Path, sys.argv[1:])
archived = ArchivedEpisodes.open(run)
list(archived.refresh())
rows = archived.rows(Filters())
records = list(archived.records(rows, tokens=True))
assert files.write(out, records) == 20
for read in (pandas.read_parquet, polars.read_parquet):
    frame = read(out)
    assert list(frame["reward"]) == [one["reward"] for one in records]
    assert len(frame["sequences"][1]) == 2
    assert list(frame["sequences"][0][0]["token_ids"]) == records[0]["sequences"][0]["token_ids"].tolist()
    assert [turn["text"] for turn in frame["turns"][16]] == [turn["text"] for turn in records[16]["turns"]]
assert files.write(out, []) == 0
assert len(pandas.read_parquet(out)) == 0
"""


def test_parquet_files_are_read_by_pandas_and_polars(run: Path, tmp_path: Path) -> None:
    hostile(run)
    with_tables(_PARQUET, run, tmp_path / "out.parquet")


_ROUTE = """
import asyncio, io, pathlib, sys
import httpx, polars
from volley_dashboard.page.app import make_app
from volley_dashboard.page.entrance import Entrance
from volley_dashboard.page.runs import Runs
entrance = Entrance()
async def main():
    transport = httpx.ASGITransport(make_app(Runs([pathlib.Path(sys.argv[1])]), entrance))
    headers = {"Authorization": f"Bearer {entrance.token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        return await client.get("/api/runs/run/episodes.parquet?step_min=5")
answer = asyncio.run(main())
assert answer.status_code == 200, answer.text
assert polars.read_parquet(io.BytesIO(answer.content))["step"].to_list() == [5] * 4
"""


def test_the_dashboard_exports_parquet(run: Path) -> None:
    with_tables(_ROUTE, run)


def with_tables(program: str, *arguments: Path) -> None:
    """Run a program of this environment with the packages of the extra `tables`."""
    python = environment("tables", ["pandas>=2.2", "polars>=1.20", "pyarrow>=20"])
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_prompt_that_a_privileged_teacher_saw_is_shown_or_what_it_lacked(made: Path) -> None:
    group = next(
        Group.decode(one)
        for one in archive.read(RunFolder(made).archive, small_run.RUN, archive.versions(RunFolder(made).archive)[-1])
    )
    view = TeacherView((TeacherPrompt(np.array([3, 4], np.int32), 1, "e000001-s000000"),))
    one, other = group.trajectories[:2]
    taught = replace(one, teacher_view=view), replace(other, teacher_view=TeacherView(lacks=("sibling",)))
    first, second = episodes.shown(replace(group, trajectories=taught), WeightVersion(1, 1), None)["trajectories"]
    assert first["sequences"][0]["teacher_prompt"] == {"text": "3 4 ", "version": "e000001-s000000"}
    assert (first["teacher_lacks"], second["teacher_lacks"]) == ([], ["sibling"])
    assert "teacher_prompt" not in second["sequences"][0]
