"""The dashboard's routes over a run that the trainer's own loop wrote, and over damaged and hostile folders."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson
import pytest

from shared.config import load
from shared.files.locks import try_lock
from shared.run import archive, token_values
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.run.token_values import TokenValues
from shared.types import Group, Trajectory, Turn, VersionSpan, WeightVersion
from shared.visible import visible
from tests.support.asgi import served
from tests.support.disk import file_size_limit
from tests.support.small_run import group, make
from volley.local.sidecars import sidecars
from volley.reporting.intervals import SuccessRate
from volley_dashboard.page import commands
from volley_dashboard.page.advice import advise
from volley_dashboard.page.answers import PageFiles
from volley_dashboard.page.app import STATIC, make_app
from volley_dashboard.page.entrance import Entrance
from volley_dashboard.page.handovers import handovers
from volley_dashboard.page.runs import Runs
from volley_dashboard.page.sidecar import in_browser
from volley_dashboard.page.state import state_of
from volley_dashboard.trajectories.episodes import answer_of, read_group
from volley_dashboard.trajectories.files import has_parquet
from volley_dashboard.trajectories.index import EpisodeIndex, Filters, Listing
from volley_python.client.run_reader import thinned

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m\x00"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    make(root / "r")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in a folder of its own; its index lies there too."""
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.setattr("volley_dashboard.trajectories.index.CACHE", tmp_path / "cache")
    return tmp_path / "runs"


@pytest.fixture
async def page(root: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that the link has admitted."""
    entrance = Entrance()
    async with served(make_app(Runs([root]), entrance)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get(f"/login?code={entrance.code}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield client


async def get(page: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await page.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return orjson.loads(answer.content)


async def test_only_the_link_admits_and_only_once(root: Path) -> None:
    entrance = Entrance()
    async with served(make_app(Runs([root]), entrance)) as url, httpx.AsyncClient(base_url=url) as stranger:
        assert (await stranger.get("/")).status_code == 200  # the page without any data
        for path in ("/api/runs", "/api/runs/r", "/api/runs/r/episodes", "/api/runs/r/tickets/0", "/metrics"):
            assert (await stranger.get(path)).status_code == 401
        assert (await stranger.get("/login?code=wrong")).status_code == 403
        used = entrance.code
        cookie = (await stranger.get(f"/login?code={used}")).headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}
        assert (await stranger.get("/api/runs")).status_code == 200
        assert (await stranger.get(f"/login?code={used}")).status_code == 403
        assert (await stranger.post("/api/runs")).status_code == 405
        stranger.cookies.clear()
        assert (
            await stranger.get("/api/runs", headers={b"cookie": b"volley_dashboard_%d=\xff;a" % httpx.URL(url).port})
        ).status_code == 401


async def test_a_browser_stays_admitted_when_it_opens_another_dashboard(root: Path) -> None:
    first, second = Entrance(), Entrance()
    async with (
        served(make_app(Runs([root]), first)) as one,
        served(make_app(Runs([root]), second)) as other,
        httpx.AsyncClient() as browser,
    ):
        for url, entrance in ((one, first), (other, second)):
            await browser.get(f"{url}/login?code={entrance.code}")
        for url in (one, other):
            assert (await browser.get(f"{url}/api/runs")).status_code == 200


async def test_each_answer_forbids_what_is_not_from_here(page: httpx.AsyncClient) -> None:
    for path in (
        "/",
        f"/static/{PageFiles(STATIC).digest}/app.js",
        "/static/old/app.js",
        "/api/runs",
        "/api/runs/none",
        "/static/../app.py",
    ):
        policy = (await page.get(path)).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for file in await asyncio.to_thread(lambda: list(STATIC.iterdir())):
        text = file.read_text(encoding="utf-8")
        assert "innerHTML" not in text or file.name == "uplot.js"
        assert "https://" not in text.replace("https://github.com/leeoniya/uPlot", "")


@pytest.mark.parametrize(("file", "tag"), [("start.js", "script"), ("style.css", "style")])
async def test_the_policy_names_what_stands_in_the_page(page: httpx.AsyncClient, file: str, tag: str) -> None:
    answer = await page.get("/")
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
    assert content == (STATIC / file).read_text(encoding="utf-8")
    (allowed,) = re.findall(f"{tag}-src 'self' '(.*?)';", answer.headers["content-security-policy"])
    assert allowed == "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


async def test_a_browser_keeps_the_files_of_the_page_until_they_change(page: httpx.AsyncClient, tmp_path: Path) -> None:
    first = await page.get("/")
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', first.text)
    assert first.headers["cache-control"] == "no-cache"
    assert {"app.js", "run.js", "icon.svg"} <= {path.rpartition("/")[2] for path in named}
    for path in named:
        found = await page.get(path)
        assert (found.status_code, found.headers["cache-control"]) == (200, "max-age=31536000, immutable")
    old = await page.get("/static/0123456789abcdef/app.js")
    assert (old.status_code, "immutable" in old.headers.get("cache-control", "")) == (404, False)
    (files := tmp_path / "files").mkdir()
    (files / "index.html").write_text('<script src="/static/a.js">', encoding="utf-8")
    before = PageFiles(files).digest
    (files / "a.js").write_text("1", encoding="utf-8")
    assert PageFiles(files).digest != before


async def test_a_run_is_shown_with_its_curves_and_ledger(page: httpx.AsyncClient) -> None:
    (row,) = await get(page, "/api/runs")
    assert (row["name"], row["state"], row["step"], row["problem"]) == ("r", "finished", 5, None)
    found = await get(page, "/api/runs/r")
    assert found["curves"]["train"]["step"] == [1, 2, 3, 4, 5]
    assert len(found["curves"]["train"]["columns"]["reward_mean"]) == 5
    assert found["dispositions"]["trained"] >= 10
    assert {"stale", "failed"} <= found["dispositions"].keys()
    assert len(found["chain"]) == 64
    assert (await page.get("/api/runs/other")).status_code == 404


async def test_lines_of_undone_steps_are_in_no_curve(page: httpx.AsyncClient, root: Path) -> None:
    before = await get(page, "/api/runs/r")
    with (root / "r" / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps({"step": 4, "version": "e000009-s000004", "loss": 99.0}) + b"\n")
    assert (await get(page, "/api/runs/r"))["curves"] == before["curves"]


async def test_the_newest_run_comes_first_and_runs_keep_their_names(page: httpx.AsyncClient, root: Path) -> None:
    record = orjson.loads((root / "r" / "run.json").read_bytes())
    for name, created in (("a", record["created"] - 60), ("z", record["created"] + 60)):
        shutil.copytree(root / "r", root / name)
        (root / name / "run.json").write_bytes(orjson.dumps({**record, "created": created}))
    assert [row["name"] for row in await get(page, "/api/runs")] == ["z", "r", "a"]
    other = root.parent / "others"
    shutil.copytree(root / "r", other / "r")
    both = Runs([root, other])
    assert [both.open(name).folder.path for name in ("r", "r~2")] == [root / "r", other / "r"]


async def test_episodes_are_listed_filtered_and_sorted(page: httpx.AsyncClient) -> None:
    found = await get(page, "/api/runs/r/episodes")
    assert found["total"] == len(found["rows"]) == 20
    assert found["rows"][0]["step"] == 5
    assert (found["waiting"], found["damaged"], found["choices"]["env"]) == (0, {}, ["toy"])
    by_reward = await get(page, "/api/runs/r/episodes", sort="reward", descending=False)
    rewards = [row["reward"] for row in by_reward["rows"]]
    assert rewards == sorted(rewards)
    one = found["rows"][3]
    assert {row["ticket"] for row in (await get(page, "/api/runs/r/episodes", ticket=one["ticket"]))["rows"]} == {
        one["ticket"]
    }
    assert (await get(page, "/api/runs/r/episodes", step_min=2, step_max=3))["total"] == 8
    assert (await get(page, "/api/runs/r/episodes", text="TRAIN/", reward_min=0.5))["total"] > 0
    assert (await get(page, "/api/runs/r/episodes", text="' OR 1=1 --"))["total"] == 0
    assert len((await get(page, "/api/runs/r/episodes", limit=3, offset=18))["rows"]) == 2


async def test_listed_episodes_are_summed_up_by_environment(page: httpx.AsyncClient) -> None:
    (row,) = (await get(page, "/api/runs/r/episodes"))["environments"]
    assert (row["env"], row["episodes"]) == ("toy", 20)
    assert sum(row["ends"].values()) == 20
    assert row["failures"] == {}
    (some,) = (await get(page, "/api/runs/r/episodes", step_min=2, step_max=3))["environments"]
    assert some["episodes"] == 8
    assert (await get(page, "/api/runs/r/episodes", env="none"))["environments"] == []


def test_a_full_disk_leaves_the_index_in_memory(root: Path, tmp_path: Path) -> None:
    with file_size_limit(1000):
        index = EpisodeIndex(RunFolder(root / "r"), "r", tmp_path / "full")
        assert index.refresh() == 0
        assert index.page(Listing())["total"] == 20
    assert index.choices()["env"] == ["toy"]


def test_failures_are_counted_by_class(root: Path) -> None:
    version = WeightVersion(9, 1)
    failed = [
        replace(one, failures={"EpisodeLost": 2, "Unavailable": 1}, end="answered")
        for one in group(70, version).trajectories
    ]
    archive = Archive(root / "r" / "archive", "r")
    archive.claim(9)
    archive.write(version, [Group(70, "toy", "train/70", tuple(failed)).encode()])
    index = EpisodeIndex(RunFolder(root / "r"), "r", root)
    index.refresh()
    (row,) = index.environments(Filters(ticket=70))
    assert row["failures"] == {"EpisodeLost": 2 * len(failed), "Unavailable": len(failed)}
    assert row["ends"] == {"answered": len(failed)}


async def test_hand_overs_are_shown_by_version_and_server(page: httpx.AsyncClient, root: Path) -> None:
    server = {"url": "http://h:1", "seconds": 0.5, "timings": {"pull_s": 0.2, "pause_s": 0.01, "pulled_bytes": 7}}
    lost = {"url": "http://h:2", "seconds": 1.0, "timings": {}, "error": "it is away"}
    line = {
        "step": 5,
        "version": "e000002-s000005",
        "n_bytes": 100,
        "delta_bytes": 9,
        "record_s": 0.25,
        "commit_s": 0.25,
    }
    rows = [line | {"servers": [server, lost, "no server"]}, line | {"servers": []}, line | {"servers": None}]
    found = handovers(rows, "retract")
    assert [row["url"] for row in found] == [None, None, "http://h:1", "http://h:2"]
    assert (found[2]["pause_s"], found[2]["pulled_bytes"], found[2]["trainer_s"]) == (0.01, 7, 0.5)
    assert found[3]["error"] == "it is away"
    shown = await get(page, "/api/runs/r")
    assert {row["mode"] for row in shown["handovers"]} == {"retract"}


@pytest.mark.parametrize(
    "query", [{"sort": "step; DROP"}, {"limit": 10**6}, {"nothing": 1}, {"ticket": 10**30}, {"reward_min": "nan"}]
)
async def test_wrong_filters_are_refused(page: httpx.AsyncClient, query: dict[str, Any]) -> None:
    answer = await page.get("/api/runs/r/episodes", params=query)
    assert answer.status_code == 400 or answer.status_code == 422
    assert answer.json()["detail"]


async def test_a_ticket_is_shown_token_by_token(page: httpx.AsyncClient, root: Path) -> None:
    row = (await get(page, "/api/runs/r/episodes", sort="sequences"))["rows"][0]
    found = await get(page, f"/api/runs/r/tickets/{row['ticket']}")
    version = WeightVersion.parse(row["version"])
    group = read_group(RunFolder(root / "r"), "r", version, row["ticket"])
    for shown, one in zip(found["trajectories"], group.trajectories, strict=True):
        assert (shown["reward"], shown["success"], shown["sample"]) == (one.reward, one.success, one.sample_index)
        for sequence, whole in zip(shown["sequences"], one.sequences(), strict=True):
            assert sequence["ids"] == whole.token_ids.tolist()
            assert sequence["mask"] == whole.loss_mask.tolist()
            assert sequence["logprobs"] == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
            assert len(sequence["texts"]) == len(sequence["ids"])
    assert [line["disposition"] for line in found["ledger"]] == ["trained"]
    assert (await page.get("/api/runs/r/tickets/99999")).status_code == 404
    assert (await page.get(f"/api/runs/r/tickets/{row['ticket']}", params={"version": "e9-s9"})).status_code == 400


async def test_values_of_the_trainer_are_shown_where_a_replay_wrote_them(page: httpx.AsyncClient, root: Path) -> None:
    row = (await get(page, "/api/runs/r/episodes", sort="sequences"))["rows"][0]
    version, tokens = WeightVersion.parse(row["version"]), root / "r" / "tokens"
    group = read_group(RunFolder(root / "r"), "r", version, row["ticket"])
    values = {
        (one.ticket, one.sample_index): TokenValues(
            one.stored("logprobs") + np.float32(0.1),
            one.stored("logprobs"),
            np.arange(one.n_stored, dtype=np.uint8) % 8,
            np.arange(one.n_stored, dtype=np.float32),
        )
        for one in group.trajectories
    }
    token_values.write(tokens, "r", version, values)
    found = await get(page, f"/api/runs/r/tickets/{row['ticket']}")
    for one in found["trajectories"]:
        assert len(one["sequences"]) in (1, 2)
        for sequence in one["sequences"]:
            at = [i for i, sampled in enumerate(sequence["mask"]) if sampled]
            assert [sequence["ratio"][i] for i in at] == pytest.approx([np.exp(0.1)] * len(at), abs=1e-4)
            assert [sequence["advantage"][i] for i in at] == pytest.approx([sequence["logprobs"][i] for i in at])
            assert [sequence["marks"][i] for i in at] == [int(sequence["weight"][i]) % 8 for i in at]
            assert {*sequence["marks"]} - {0}
            assert sum(map(abs, sequence["trainer"])) == pytest.approx(sum(abs(sequence["trainer"][i]) for i in at))
    damaged = token_values.path_of(tokens, version)
    for content in (b"", b"\xc1", damaged.read_bytes()[:-9]):
        damaged.write_bytes(content)
        assert (await page.get(f"/api/runs/r/tickets/{row['ticket']}")).status_code == 400
    short = {key: TokenValues(one.logprobs[1:], one.advantages[1:]) for key, one in values.items()}
    token_values.write(tokens, "r", version, short)
    assert (await page.get(f"/api/runs/r/tickets/{row['ticket']}")).status_code == 400


async def test_an_export_holds_the_listed_episodes(page: httpx.AsyncClient) -> None:
    answer = await page.get("/api/runs/r/episodes.jsonl", params={"step_min": 5})
    lines = [orjson.loads(line) for line in answer.content.splitlines()]
    assert [(line["step"], line["sample"]) for line in lines] == [(5, 0), (5, 1), (5, 0), (5, 1)]
    assert all(turn["text"] for line in lines for turn in line["turns"])
    assert (await page.get("/api/runs/r/episodes.csv")).status_code in (404, 422)
    parquet = await page.get("/api/runs/r/episodes.parquet", params={"step_min": 5})
    assert parquet.status_code == (200 if has_parquet() else 404)
    assert (await get(page, "/api/runs/r/episodes"))["parquet"] == has_parquet()


async def test_hostile_text_and_numbers_stay_data(page: httpx.AsyncClient, root: Path) -> None:
    with (root / "r" / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps({"step": 5, "version": "e000002-s000005", HOSTILE: 1.0, "loss": "NaN"}) + b"\n")
        file.write(b'{"step": 1e999}\nnot json\n{"half')
    found = await get(page, "/api/runs/r")
    assert found["curves"]["train"]["step"] == [1, 2, 3, 4, 5]
    assert HOSTILE in found["curves"]["train"]["columns"]


async def test_commands_to_copy_are_quoted_for_a_shell(page: httpx.AsyncClient, root: Path) -> None:
    for name, copies in (("$(id);a 'b", True), ("a\x1b[201~\nid", False)):
        folder = (root / "r").rename(root / name)
        run = quote(name, safe="")
        row = (await get(page, f"/api/runs/{run}/episodes"))["rows"][0]
        shown = [(await get(page, f"/api/runs/{run}{path}"))["commands"] for path in ("", f"/tickets/{row['ticket']}")]
        for one in chain.from_iterable(shown):
            words = shlex.split(one["text"])
            assert one["copy"] == copies
            assert (words[0], words[2]) == ("volley", visible(folder))
        folder.rename(root / "r")
    *_, last = commands.of_ticket("runs/r", {"step": 1, "env": "toy;touch x\nid"})
    assert last == {"text": "volley reverify runs/r --env 'toy;touch x\\nid'", "copy": False}


async def test_lines_that_replaced_undone_ones_are_read_although_the_file_is_longer(
    page: httpx.AsyncClient, root: Path
) -> None:
    path = root / "r" / "evals.jsonl"
    line = b'{"step": 4, "success": %s, "n_tasks": 4, "reward_mean": 1.0}\n'
    path.write_bytes(line % b"0.25")
    assert 0.25 in (await get(page, "/api/runs/r"))["curves"]["success"]["columns"]["success"]
    path.write_bytes(line % b"0.75" + line.replace(b"4", b"5", 1) % b"1.0")
    found = (await get(page, "/api/runs/r"))["curves"]["success"]
    assert dict(zip(found["step"], found["columns"]["success"], strict=True)).items() >= {(4, 0.75), (5, 1.0)}


async def test_a_run_that_began_again_in_its_folder_shows_nothing_of_the_old_one(
    page: httpx.AsyncClient, root: Path
) -> None:
    assert (await get(page, "/api/runs/r/episodes"))["total"] == 20
    shutil.rmtree(root / "r" / "archive")
    (root / "r" / "metrics.jsonl").unlink()
    (root / "r" / ".beginning").write_text("another", encoding="ascii")
    assert (await get(page, "/api/runs/r/episodes"))["total"] == 0
    assert (await get(page, "/api/runs/r"))["curves"]["train"]["step"] == []


def test_numbers_that_the_index_cannot_hold_leave_only_their_file_out(root: Path, tmp_path: Path) -> None:
    folder, version = RunFolder(root / "r"), WeightVersion(2, 5)
    groups = [Group.decode(one) for one in archive.read(folder.archive, "r", version)]
    big = [
        replace(one, ticket=2**63, trajectories=tuple(replace(t, ticket=2**63) for t in one.trajectories))
        for one in groups
    ]
    archive.path_of(folder.archive, version).unlink()
    archive.Archive(folder.archive, "r").write(version, [one.encode() for one in big])
    index = EpisodeIndex(folder, "r", tmp_path / "kept")
    assert index.refresh() == 0
    assert list(index.damaged) == [str(version)]
    assert index.page(Listing())["total"] == 16


async def test_damaged_and_foreign_folders_are_named_not_read(page: httpx.AsyncClient, root: Path) -> None:
    damaged = sorted((root / "r" / "archive").glob("e*/*.zst"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert list((await get(page, "/api/runs/r/episodes"))["damaged"]) == ["e000002-s000005"]
    shutil.copytree(root / "r", root / "strange")
    (root / "strange" / "metrics.jsonl").unlink()
    os.mkfifo(root / "strange" / "metrics.jsonl")
    (root / "empty").mkdir()
    (root / "empty" / "run.json").write_text("{", encoding="utf-8")
    rows = {row["name"]: row for row in await get(page, "/api/runs")}
    assert rows["strange"]["state"] == "refused"
    assert "metrics.jsonl" in rows["strange"]["problem"]
    assert rows["empty"]["state"] == "unreadable"
    for route in ("episodes", "episodes.jsonl", "tickets/1", "fleet", "events"):
        assert (await page.get(f"/api/runs/strange/{route}")).status_code == 403


async def test_events_follow_the_files_and_end_with_the_server(root: Path) -> None:
    entrance = Entrance()
    app = make_app(Runs([root]), entrance)
    headers = {"authorization": f"Bearer {entrance.token}"}
    async with served(app) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        async with client.stream("GET", "/api/runs/r/events") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "event: records"
            with (root / "r" / "evals.jsonl").open("ab") as file:
                file.write(b'{"step": 5, "success": 1.0, "n_tasks": 4, "reward_mean": 1.0}\n')
            while (line := await anext(lines)) != "event: records":
                assert not line.startswith("event")
            app.state.dashboard.ended.set()
            assert [line async for line in lines if line.startswith("event")] == []
        assert app.state.dashboard.streams == 0


async def test_every_page_that_follows_a_run_is_told_of_its_end(root: Path) -> None:
    entrance = Entrance()
    app = make_app(Runs([root]), entrance)
    record = orjson.loads((root / "r/run.json").read_bytes())
    (root / "r/run.json").write_bytes(orjson.dumps({**record, "finished": False}))
    headers = {"authorization": f"Bearer {entrance.token}"}
    async with served(app) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        drawn = await get(client, "/api/runs/r")
        assert drawn["summary"]["state"] == "stopped"
        path, seen = "/api/runs/r/events", {"seen": drawn["edition"]}
        async with client.stream("GET", path, params=seen) as one, client.stream("GET", path, params=seen) as other:
            (root / "r/run.json").write_bytes(orjson.dumps(record))
            for stream in (one, other):
                assert await anext(stream.aiter_lines()) == "event: records"
            assert (await get(client, "/api/runs/r"))["summary"]["state"] == "finished"
            app.state.dashboard.ended.set()


async def test_all_pages_show_a_run_that_has_been_started_but_does_not_answer_as_starting(
    page: httpx.AsyncClient, root: Path
) -> None:
    record = orjson.loads((root / "r/run.json").read_bytes())
    (root / "r/run.json").write_bytes(orjson.dumps({**record, "finished": False}))
    with (root / "r/.lock").open("wb") as lock:
        assert try_lock(lock.fileno())
        assert [one["state"] for one in await get(page, "/api/runs")] == ["starting"]
        assert (await get(page, "/api/runs/r"))["summary"]["state"] == "starting"
        assert (await get(page, "/api/runs/r/fleet"))["state"] == "starting"
    assert [one["state"] for one in await get(page, "/api/runs")] == ["stopped"]


@pytest.mark.parametrize(
    ("recorded", "of_services", "phase", "has_answered", "shown"),
    [
        ("finished", "running", "training", True, "finished"),
        ("failed", "stopped", "", False, "failed"),
        ("running", "stopped", "", False, "starting"),
        ("running", "stopped", "", True, "ending"),
        ("running", "finished", "done", True, "ending"),
        ("running", "running", "", False, "starting"),
        ("running", "running", "loading", True, "starting"),
        ("running", "wedged", "loading", True, "wedged"),
        ("running", "running", "warm start", True, "running"),
        ("running", "waiting", "waiting", True, "waiting"),
        ("running", "unknown", "", False, "running"),
    ],
)
def test_files_and_services_together_give_one_state(
    recorded: str, of_services: str, phase: str, has_answered: bool, shown: str
) -> None:
    report = {"state": of_services, "services": [{"kind": "trainer", "facts": {"phase": phase}}]}
    assert state_of(recorded, report, has_answered=has_answered) == shown


def test_the_index_is_kept_and_an_unwritable_cache_is_no_error(root: Path, tmp_path: Path) -> None:
    folder = RunFolder(root / "r")
    first = EpisodeIndex(folder, "r", tmp_path / "kept")
    assert first.refresh(most_files=2) == 3
    assert EpisodeIndex(folder, "r", tmp_path / "kept").refresh() == 0
    (tmp_path / "file").touch()
    beside = EpisodeIndex(folder, "r", tmp_path / "file")
    beside.refresh()
    assert beside.page(Listing())["total"] == len(list(beside.every(Filters()))) == 20


STEADY = {"entropy": 1.0, "success": 0.2, "zero_variance_groups": 0.1, "wait_s": 1.0, "step_s": 2.0, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("late", "metric"),
    [
        ({"entropy": 0.01}, "entropy"),
        ({"zero_variance_groups": 0.6}, "zero_variance_groups"),
        ({"wait_s": 9.0}, "wait_s"),
        ({"wait_s": 0.0}, "step_s"),
        ({"grad_norm": 40.0}, "grad_norm"),
        ({"clip_fraction": 0.5}, "clip_fraction"),
        ({"effective_share": 0.1}, "effective_share"),
        ({"truncation_rate": 0.9}, "truncation_rate"),
        ({"logprob_abs_diff_current": 0.1}, "logprob_abs_diff_current"),
        ({"failed_attempts": {"EngineError": 5}, "episodes": 8}, "failed_attempts"),
    ],
)
def test_advice_names_what_changed_and_a_steady_run_gets_none(late: dict[str, Any], metric: str) -> None:
    steps = [{"step": n, **STEADY} for n in range(1, 31)]
    assert advise(steps, []) == []
    changed = [*steps, *({"step": n, **STEADY, **late} for n in range(31, 37))]
    (found,) = advise(changed, [])
    assert found.metric == metric
    if metric in ("entropy", "logprob_abs_diff_current"):
        assert "31" in found.text


@pytest.mark.parametrize("metric", [*STEADY, "failed_attempts", "episodes", "truncation_rate"])
@pytest.mark.parametrize("value", [None, "x", [1], {"a": "b"}, {"a": [1]}, True, -1])
def test_advice_reads_past_values_of_other_types(metric: str, value: object) -> None:
    steps = [
        {**STEADY, "step": n, "failed_attempts": {"EngineError": 1}, "episodes": 8, metric: value} for n in range(9)
    ]
    assert all(one.text for one in advise(steps, []))


def test_advice_names_settings_that_exist() -> None:
    from shared.schema import RunConfig

    source = STATIC.parent.joinpath("advice.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:algorithm|data|grpo_config|orchestrator|services|trainer)(?:\.[a-z_]+)+", source))
    assert len(named) > 8
    config = RunConfig.model_validate({"model": {"path": "models/tiny"}, "data": {"env": "frozen_lake"}})
    for key in named:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part, value if value is None else AttributeError)
        assert value is not AttributeError, key


def test_advice_on_a_fall_needs_intervals_apart() -> None:
    def rate(step: int, success: float) -> SuccessRate:
        row = SuccessRate.of({"step": step, "success": success, "n_tasks": 100})
        assert row is not None
        return row

    assert advise([], [rate(0, 0.5), rate(2, 0.45)]) == []
    (found,) = advise([], [rate(0, 0.9), rate(2, 0.3)])
    assert (found.level, found.metric) == ("warning", "success")


def test_the_server_beside_a_run_starts_with_the_first_visitor_and_ends_with_the_run(root: Path) -> None:
    folder, said = RunFolder(root / "r"), list[str]()
    folder.logs.mkdir(exist_ok=True)
    with in_browser(folder, said.append):
        link = said[0].partition(" ")[2]
        assert not (folder.logs / "dashboard.log").exists()
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            assert browser.get(link).status_code == 200
            address = httpx.URL(link)
            assert browser.get(address.copy_with(path="/api/runs", query=None)).json()[0]["name"] == "r"
    with pytest.raises(OSError), socket.create_connection((address.host, address.port or 0), 1):
        pass


def test_a_run_that_wants_no_dashboard_gets_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "run.dashboard=false"]).config
    with sidecars(RunFolder(tmp_path / "r"), config):
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [["nowhere"], ["--port", "99999"], ["--host", "8.8.8.8"]])
def test_what_cannot_be_served_is_refused_at_once(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "volley", "dashboard", *arguments], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


async def test_a_failed_run_shows_its_error_and_the_end_of_its_last_log(page: httpx.AsyncClient, root: Path) -> None:
    record = orjson.loads((root / "r/run.json").read_bytes())
    (root / "r/run.json").write_bytes(orjson.dumps({**record, "finished": False, "failed": "no memory"}))
    (root / "r/logs").mkdir(exist_ok=True)
    (root / "r/logs/trainer.log").write_text("".join(f"line {i}\n" for i in range(99)), encoding="utf-8")
    found = await get(page, "/api/runs/r")
    assert (found["summary"]["state"], found["summary"]["failed"]) == ("failed", "no memory")
    assert (found["log"]["name"], found["log"]["lines"][-1], len(found["log"]["lines"])) == (
        "trainer.log",
        "line 98",
        30,
    )
    assert any("volley up" in one["text"] for one in found["commands"])
    assert (await get(page, "/api/runs"))[0]["state"] == "failed"


async def test_answers_and_neighbours_lead_through_the_episodes(page: httpx.AsyncClient) -> None:
    rows = (await get(page, "/api/runs/r/episodes", sort="ticket", descending=False))["rows"]
    assert all(isinstance(row["answer"], str) for row in rows)
    seen, reference = list[int](), f"{rows[0]['version']}.{rows[0]['ticket']}"
    while reference is not None:
        version, ticket = reference.split(".")
        found = await get(page, f"/api/runs/r/tickets/{ticket}", version=version)
        if seen:
            assert found["neighbours"]["previous"].endswith(f".{seen[-1]}")
        seen.append(found["ticket"])
        reference = found["neighbours"]["next"]
    assert set(seen) == {row["ticket"] for row in rows}


def test_long_curves_are_thinned_to_their_last_step() -> None:
    rows = [{"step": i, "loss": float(i)} for i in range(10_001)]
    assert thinned(rows, 1000)[0] == rows[0]
    assert thinned(rows, 1000)[-1] == rows[-1]
    assert 900 < len(thinned(rows, 1000)) <= 1001
    assert thinned(rows[:5], 1000) == rows[:5]
    assert thinned([], 10) == []
    two = [{"step": i // 2, "env": ("a", "b")[i % 2]} for i in range(1200)]
    assert [row["env"] for row in thinned(two, 1000)].count("b") == len(thinned(two, 1000)) / 2


@pytest.mark.parametrize(("n", "shown"), [(3, "3 4 5"), (60, " ".join(map(str, range(3, 51))) + "…")])
def test_an_answer_is_shown_by_its_first_tokens(n: int, shown: str) -> None:
    ids, mask = np.arange(n + 3, dtype=np.int32), np.r_[np.zeros(3, np.uint8), np.ones(n, np.uint8)]
    version = str(WeightVersion(1, 0))
    turns = (Turn(0, 3, "prompt"), Turn(3, n + 3, "assistant"))
    spans = (VersionSpan(version, 3, n + 3),)
    one = Trajectory(1, 0, 0, "e", "t", 3, ids, mask, mask * -0.5, spans, turns, 1.0, True, "completed")
    assert answer_of(one, None) == shown
