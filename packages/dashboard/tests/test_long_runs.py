"""Runs of many steps: the first picture from a sample of their lines, then each line read once."""

from __future__ import annotations

import asyncio
import gzip
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from shared.run import commits
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from tests.support.asgi import served
from tests.support.small_run import make
from volley_dashboard.page.answers import PageFiles
from volley_dashboard.page.app import STATIC, make_app
from volley_dashboard.page.entrance import Entrance
from volley_dashboard.page.live import events
from volley_dashboard.page.runs import Runs
from volley_python.client import run_reader
from volley_python.client.counted_rows import CountedRows
from volley_python.client.run_reader import RunReader, sampled
from volley_python.folder import counted_lines

STEPS = 3000


def line(step: int, epoch: int = 2, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "version": f"e{epoch:06d}-s{step:06d}",
        "reward_mean": step / STEPS,
        "note": "x" * 900,
        **values,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trainer is in its second epoch, which began at step 2."""
    root = tmp_path_factory.mktemp("long") / "runs"
    make(root / "r")
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> RunFolder:
    """The same run after many more steps."""
    shutil.copytree(made, tmp_path / "runs")
    found = RunFolder(tmp_path / "runs/r")
    first = found.metrics.read_bytes()
    found.metrics.write_bytes(first + b"".join(orjson.dumps(line(i)) + b"\n" for i in range(6, STEPS + 1)))
    advance(found, STEPS)
    return found


def advance(folder: RunFolder, step: int) -> None:
    head = commits.newest(folder)
    assert head is not None
    log = CommitLog(folder.archive, "r")
    log.fence(head.epoch)
    log.append(replace(head, step=step), "0" * 64)


def steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_the_first_look_at_a_long_run_reads_a_sample(folder: RunFolder) -> None:
    reader = RunReader("r", folder)
    first, whole = reader.glance(), reader.snapshot()
    assert first.revision is None
    assert whole.revision is not None
    assert steps(whole.train) == [*range(1, STEPS + 1)]
    assert 300 < len(first.train) < 600
    assert steps(first.train)[0] == 1
    assert steps(first.train)[-50:] == steps(whole.train)[-50:]
    assert max(np.diff(steps(first.train))) < 15
    assert all(row in whole.train for row in first.train[::20])
    assert reader.glance() is whole
    assert (first.dispositions, first.handovers) == ({}, ())
    assert whole.dispositions


def test_a_run_of_long_lines_is_read_whole(folder: RunFolder) -> None:
    lines = (orjson.dumps(line(i, note="x" * 70_000)) + b"\n" for i in range(STEPS - 60, STEPS + 1))
    folder.metrics.write_bytes(b"".join(lines))
    found = RunReader("r", folder).glance()
    assert (found.revision is None, steps(found.train)[-1]) == (False, STEPS)


def test_a_sample_is_not_shown_if_its_newest_lines_were_undone(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.writelines(orjson.dumps(line(STEPS + i, epoch=1)) + b"\n" for i in range(1, 200))
    found = RunReader("r", folder).glance()
    assert (found.revision is None, steps(found.train)[-1]) == (False, STEPS)


async def test_the_page_gets_a_sample_and_is_drawn_again(folder: RunFolder) -> None:
    entrance, runs = Entrance(), Runs([folder.path.parent])
    async with served(make_app(runs, entrance)) as url, httpx.AsyncClient(base_url=url) as client:
        await client.get(f"/login?code={entrance.code}")
        answers = [orjson.loads((await client.get("/api/runs/r?columns=reward_mean,time")).content)]
        reader, ended = await asyncio.to_thread(runs.open, "r"), asyncio.Event()
        async for event in events(reader, SimpleNamespace(), ended, answers[0]["edition"]):  # type: ignore[arg-type]
            assert event == b"event: records\ndata: {}\n\n"
            break
        answers += [
            orjson.loads((await client.get("/api/runs/r", params=asked)).content)
            for asked in ({"columns": "reward_mean"}, {})
        ]
    first, whole, everything = answers
    assert [found["summary"]["step"] for found in answers] == [STEPS] * 3
    assert (first["dispositions"], first["advice"], first["n_steps"] < 600) == ({}, [], True)
    assert (whole["dispositions"]["trained"] >= 10, whole["n_steps"]) == (True, STEPS)
    assert first["edition"] != whole["edition"]
    curve = whole["curves"]["train"]
    assert (list(curve["columns"]), len(curve["step"]) <= 1001, curve["step"][-1]) == (["reward_mean"], True, STEPS)
    assert np.allclose(curve["columns"]["reward_mean"][-1], 1.0)
    assert {"loss", "ends/completed", "reward_mean"} <= everything["curves"]["train"]["columns"].keys()


async def test_answers_are_packed_for_those_that_accept_it(folder: RunFolder) -> None:
    entrance = Entrance()
    async with served(make_app(Runs([folder.path.parent]), entrance)) as url, httpx.AsyncClient(base_url=url) as client:
        await client.get(f"/login?code={entrance.code}")
        for path in ("/api/runs/r", f"/static/{PageFiles(STATIC).digest}/uplot.js"):
            sent = []
            for accepted in ("gzip", "identity", "gzip;q=0"):
                async with client.stream("GET", path, headers={"accept-encoding": accepted}) as answer:
                    raw = b"".join([block async for block in answer.aiter_raw()])
                    sent.append((answer.headers.get("content-encoding"), raw))
            assert [encoding for encoding, _ in sent] == ["gzip", None, None]
            assert len(sent[0][1]) < len(sent[1][1]) / 2
            assert gzip.decompress(sent[0][1])[:200] == sent[1][1][:200]


def test_each_new_line_is_read_once(folder: RunFolder) -> None:
    reader = RunReader("r", folder)
    before = reader.snapshot()
    with folder.metrics.open("ab") as file:
        file.write(orjson.dumps(line(STEPS + 1)) + b"\n")
    assert steps(reader.snapshot().train)[-1] == STEPS  # not committed yet
    advance(folder, STEPS + 1)
    after = reader.snapshot()
    assert steps(after.train)[-1] == STEPS + 1
    assert all(one is other for one, other in zip(before.train, after.train, strict=False))


@pytest.mark.parametrize("change", ["cut", "replaced", "restored", "ledger"])
def test_changed_files_are_read_anew(folder: RunFolder, change: str) -> None:
    reader = RunReader("r", folder)
    reader.snapshot()
    lines, ended = (path.read_bytes().splitlines(keepends=True) for path in (folder.metrics, folder.ledger))
    if change == "cut":
        for path, kept in ((folder.metrics, lines[:1000]), (folder.ledger, ended[:3])):
            path.write_bytes(b"".join(kept))
    elif change == "replaced":  # the last line is the same, at the same place
        lines[500] = lines[500].replace(b'"note":"x', b'"note":"y')
        folder.metrics.with_suffix(".new").write_bytes(b"".join(lines))
        folder.metrics.with_suffix(".new").replace(folder.metrics)
    elif change == "ledger":  # of the same size
        folder.ledger.unlink()
        folder.ledger.write_bytes(b"".join(ended).replace(b'"trained"', b'"failed!"'))
    else:  # an older copy that has gone on
        folder.metrics.unlink()
        folder.metrics.write_bytes(
            b"".join([*lines[:1000], *(orjson.dumps(line(i, reward_mean=9.0)) + b"\n" for i in range(990, STEPS + 1))])
        )
    changed, fresh = reader.snapshot(), RunReader("r", folder).snapshot()
    assert (changed.train, changed.dispositions) == (fresh.train, fresh.dispositions)


def test_sampled_lines_are_whole_and_include_the_first_and_the_last(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert sampled(path, 10) == []
    for n in (0, 1, 50, 5000):
        path.write_bytes(
            b"".join(orjson.dumps({"step": i, "text": "a" * (i * 7919 % 300)}) + b"\n" for i in range(n)) + b'{"st'
        )
        found = steps(sampled(path, 100))
        assert found == sorted(set(found))
        assert (
            found == [*range(n)]
            if n <= 50
            else (found[0] == 0 and found[-300:] == [*range(n - 300, n)] and len(found) < 900)
        )


def reference(rows: Sequence[Mapping[str, Any]], head: TrainerState | None) -> list[Mapping[str, Any]]:
    last = {(row["step"], row.get("env") or ""): row for row in counted_lines.of_steps(rows, head)}
    return [last[key] for key in sorted(last)]


def heads(rng: np.random.Generator, state: TrainerState) -> Iterator[TrainerState | None]:
    """Heads of a run whose trainer goes on, is started again from an earlier step, or is looked at without a head."""
    yield None
    epoch, step, lineage = 1, 0, [(1, 0)]
    for _ in range(40):
        if rng.random() < 0.2:
            epoch, step = epoch + 1, int(rng.integers(0, step + 1))
            lineage = [one for one in lineage if one[1] <= step] + [(epoch, step)]
        else:
            step += int(rng.integers(0, 4))
        yield None if rng.random() < 0.05 else replace(state, epoch=epoch, step=step, lineage=tuple(lineage))


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_count_are_the_same_however_they_arrive(made: Path, seed: int) -> None:
    rng, state = np.random.default_rng(seed), commits.newest(RunFolder(made / "r"))
    assert state is not None
    rows, counting = list[dict[str, Any]](), CountedRows(counted_lines.of_steps)
    for head in heads(rng, state):
        epoch, step = (head.epoch, head.step) if head else (1, 0)
        new = [
            line(
                max(1, step + int(rng.integers(-2, 4))),
                max(1, epoch - int(rng.integers(0, 2))),
                env=["", "other"][rng.integers(2)],
            )
            for _ in range(rng.integers(0, 5))
        ]
        rows += new
        counting.add(new)
        assert list(counting.of(head)) == reference(rows, head)


async def test_a_long_run_is_drawn_less_often(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volley_dashboard.page.live._POLL_S", 0.01)
    monkeypatch.setattr("volley_dashboard.page.live._LONG_S", 3600.0)
    reader, ended, seen = RunReader("r", folder), asyncio.Event(), 0

    async def go_on() -> None:
        for i in range(1, 20):
            with folder.metrics.open("ab") as file:
                file.write(orjson.dumps(line(STEPS + i)) + b"\n")
            await asyncio.sleep(0.02)
        record = orjson.loads(folder.record.read_bytes())
        folder.record.write_bytes(orjson.dumps({**record, "finished": False}))
        while seen < 2:
            await asyncio.sleep(0.01)
        ended.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(go_on())
        async for _ in events(reader, SimpleNamespace(), ended, ""):  # type: ignore[arg-type]
            seen += 1
    assert seen == 2  # the first lines, and the new state


def test_files_of_a_short_run_are_read_at_once(made: Path) -> None:
    assert (made / "r/metrics.jsonl").stat().st_size < run_reader._MOST_AT_ONCE
    assert RunReader("r", RunFolder(made / "r")).glance().revision is not None
