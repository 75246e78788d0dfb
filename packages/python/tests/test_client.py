"""`volley.Client`: records of a finished run, services of a live one, and what a wrong use is told."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from shared.errors import ConfigError, InputError, NotFound, ServiceUnreachable, Unauthorized, Unavailable
from shared.process.ports import free_port
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Trajectory, WeightVersion
from tests.support import small_run
from tests.support.stack import Training, training
from volley import AsyncClient, Client, Run
from volley.layout import PROJECT
from volley_python.client.tables import Table

EXTERNAL = """
class Echo:
    agent = "external"
    splits = {"train": 100, "eval": 10}

    def reset(self, split, index, seed):
        return f"say {2 * index + (split == 'eval')}"
"""
HEAVY = {"aiohttp", "fastapi", "httpx", "numpy", "omegaconf", "orjson", "pydantic"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("made") / small_run.RUN)


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("volley_dashboard.trajectories.index.CACHE", tmp_path / "cache")
    return Path(shutil.copytree(made, tmp_path / "r"))


@pytest.fixture
def client(run: Path) -> Iterator[Client]:
    with Client(run) as client:
        yield client


def test_the_import_is_light() -> None:
    code = f"import sys; from volley import AsyncClient, Client; sys.exit(' '.join({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
    assert (done.stderr.strip(), done.returncode) == ("", 0) or done.stderr == "\n"


def test_the_clients_own_wheel_needs_nothing_else_of_volley(run: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tools.client_wheel", str(tmp_path)], cwd=PROJECT, check=True)
    (wheel,) = tmp_path.glob("volley_rl_client-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        needed = re.findall(r"^Requires-Dist: ([\w-]+)(.*extra.*)?", archive.read(about).decode(), re.MULTILINE)
        archive.extractall(tmp_path / "site")
    expected = [
        "aiohappyeyeballs",
        "aiohttp",
        "blake3",
        "httptools",
        "msgpack",
        "numpy",
        "orjson",
        "pydantic",
        "zstandard",
    ]
    assert sorted(name for name, extra in needed if not extra) == expected
    assert sorted(name for name, extra in needed if extra) == ["jinja2", "omegaconf", "pyyaml", "tokenizers"]
    code = """
import sys
sys.modules.update(dict.fromkeys(["fastapi", "httpx", "starlette", "uvicorn", "huggingface_hub", "opentelemetry"]))
if sys.argv[2] == "without":
    sys.modules.update(dict.fromkeys(["jinja2", "omegaconf", "tokenizers", "yaml"]))
from volley_client import Client
from volley_client.shared.clients import env
from volley_client.volley_python.diagnosis import observing
from volley_client.volley_python.submissions import source, waiting

client = Client(sys.argv[1])
found = client.trajectories(step_min=5, reward_min=1)
ticket = client.ticket(found.rows[0]["ticket"])
if sys.argv[2] == "with":  # whatever packages add to a configuration
    from volley_client.shared import config

    modes = [config.load([path]).config.mode for path in sys.argv[3:]]
    assert modes == ["rl", "sft"], modes
print(client.summary()["state"], len(client.steps()), len(found), len(ticket["trajectories"]))
print({"services", "shared", "volley", "volley_dashboard"} & {name.partition(".")[0] for name in sys.modules})
"""
    configurations = [PROJECT / "configs" / "quickstart.yaml", tmp_path / "sft.yaml"]
    configurations[1].write_text("mode: sft\nsft: {train: [talks.jsonl]}\nmodel: {path: m}\n", encoding="utf-8")
    variables = {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for extra in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(run), extra, *map(str, configurations)],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert (done.stderr, done.stdout) == ("", "finished 5 2 2\nset()\n")


def test_the_records_of_a_finished_run(client: Client, run: Path) -> None:
    summary = client.summary()
    assert (summary["state"], summary["step"]) == ("finished", 5)
    steps = client.steps().to_numpy()
    assert steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert steps["reward_mean"].dtype == np.float64
    assert {line["disposition"] for line in client.ledger()} >= {"trained", "stale", "failed"}
    assert len(client.evaluations()) == len(client.supervised_steps()) == 0
    assert client.status()["state"] in ("stopped", "unknown")


def test_trajectories_are_read_when_asked_for(client: Client, tmp_path: Path) -> None:
    found = client.trajectories(step_min=5, reward_min=1)
    assert len(found) == 2
    assert found.to_numpy()["reward"].tolist() == [1.0, 1.0]
    (one, _) = found
    assert isinstance(one, Trajectory)
    assert (one.token_ids.dtype, one.logprobs.dtype) == (np.int32, np.float32)
    assert len(one.branches) == 1
    record = next(found.records(tokens=True))
    assert (record["ticket"], len(record["sequences"])) == (one.ticket, 2)
    assert found.export(tmp_path / "e.jsonl") == 2
    assert client.ticket(one.ticket)["trajectories"][1]["reward"] == one.reward


def test_episodes_come_in_the_order_of_their_rows(client: Client, run: Path) -> None:
    folder, version = RunFolder(run), WeightVersion(2, 5)
    groups = list(archive.read(folder.archive, "r", version))
    archive.path_of(folder.archive, version).unlink()
    archive.Archive(folder.archive, "r").write(version, groups[::-1])
    found = client.trajectories()
    expected = [(row["ticket"], row["sample"]) for row in found.rows]
    assert [(one.ticket, one.sample_index) for one in found] == expected
    assert [(one["ticket"], one["sample"]) for one in found.records()] == expected


@pytest.mark.parametrize(("mode", "algorithm"), [("rl", "grpo"), ("sft", "sft"), ("dpo", "dpo")])
def test_a_supervised_run_names_its_mode_as_algorithm(client: Client, run: Path, mode: str, algorithm: str) -> None:
    record = orjson.loads((run / "run.json").read_bytes())
    record["config"] |= {"mode": mode, "algorithm.name": "grpo"}
    (run / "run.json").write_bytes(orjson.dumps(record))
    assert client.summary()["algorithm"] == algorithm


def test_a_folder_that_is_gone_is_named(client: Client, run: Path) -> None:
    assert len(client.steps()) == 5
    shutil.rmtree(run)
    for method in (client.steps, client.trajectories, client.summary, client.status):
        with pytest.raises(ConfigError, match=str(run)):
            method()


def test_a_forked_process_has_a_loop_of_its_own(client: Client) -> None:
    n = len(client.steps())
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        found = None
        with suppress(BaseException):
            found = len(client.steps())
            client.close()
        os._exit(found != n)
    assert (os.waitpid(child, 0)[1], len(client.steps())) == (0, n)


def test_a_followed_run_that_has_ended_ends_the_loop(client: Client) -> None:
    kinds = [event.kind for event in client.follow(from_start=True)]
    assert kinds.count("step") == 5
    assert kinds.count("ticket") >= 10
    assert list(client.follow()) == []


async def test_lines_come_while_a_process_works_on_the_run(run: Path) -> None:
    folder = RunFolder(run)
    folder.record.write_text(folder.record.read_text("utf-8").replace('"finished": true', '"finished": false'), "utf-8")
    from shared.files.locks import try_lock

    known = [one async for one in AsyncClient(run).follow(from_start=True)]
    with (run / ".lock").open("a+", encoding="utf-8") as lock:
        assert try_lock(lock)
        following = AsyncClient(run).follow(from_start=True, poll_s=0.01)
        assert [await anext(following) for _ in known] == known
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        with folder.metrics.open("a", encoding="utf-8") as file:
            file.write('{"step": 6, "version": "e000002-s000006"}\n{"step": 7, "ver')
        event = await asyncio.wait_for(waiting, 30)
        assert (event.kind, event.record["step"]) == ("step", 6)
    assert [one async for one in following] == []


@pytest.mark.parametrize(
    ("use", "kind", "named"),
    [
        (lambda run: Client(), ConfigError, "folder"),
        (lambda run: Client("http://127.0.0.1:1"), ConfigError, "address"),
        (lambda run: Client(run.parent / "none"), ConfigError, "none"),
        (lambda run: Client(run).trajectories(colour="red"), ConfigError, "colour"),
        (lambda run: Client(run).trajectories(step_min="x"), ConfigError, "step_min"),
        (lambda run: Client(run).ticket(99_999), NotFound, "99999"),
        (lambda run: Client(run).ticket(10**30), NotFound, "10000"),
        (lambda run: Client(run).submit(), ConfigError, "file"),
        (lambda run: Client(run).submit(code="x = 1"), ConfigError, "name"),
        (lambda run: Client(run).submit("no.py"), ConfigError, "no.py"),
        (lambda run: Client(env=f"http://127.0.0.1:{free_port()}").environments(), ServiceUnreachable, "/environments"),
        (lambda run: Client(env="http://127.0.0.1:1").claim(), ConfigError, "orchestrator"),
        (lambda run: Client(env="http://127.0.0.1:1").steps(), ConfigError, "folder"),
    ],
)
def test_wrong_use_is_named(run: Path, use: Callable[[Path], Any], kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        use(run)


def test_a_folder_of_links_is_refused_unless_it_is_trusted(run: Path) -> None:
    folder = RunFolder(run)
    folder.metrics.rename(run.parent / "elsewhere")
    folder.metrics.symlink_to(run.parent / "elsewhere")
    with pytest.raises(ConfigError, match="link"):
        Client(run).steps()


def test_columns_are_arrays_of_their_kind() -> None:
    rows = [{"a": 1, "b": True, "c": 0.5, "d": "x", "e": [1]}, {"a": 2, "b": False, "c": None, "d": "y\x00"}]
    found = Table(rows).to_numpy()
    assert [found[name].dtype.kind for name in "abcde"] == ["i", "b", "f", "O", "O"]
    assert np.isnan(found["c"][1])
    assert found["e"].tolist() == [[1], None]
    assert Table([]).to_numpy() == {}
    assert Table(rows)[1:].to_numpy()["a"].tolist() == [2]


def test_a_table_prints_its_columns() -> None:
    rows = [{"step": 0, "success": 0.25}, {"step": 1, "loss": -1.0}]
    assert str(Table(rows)[["step", "success"]]) == "step  success\n   0     0.25\n   1        –"
    assert str(Table([])) == "Table(0 rows)"


def test_metrics_of_a_run_need_no_pandas(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    RunFolder(run).evals.write_bytes(orjson.dumps({"step": 0, "env": None, "success": 0.5}) + b"\n")
    found = Run(run).metrics()
    assert isinstance(found, Table)
    columns = found.columns()
    assert columns["step"] == sorted(columns["step"])
    assert {"reward_mean", "eval_success"} <= columns.keys()


def test_tables_name_the_missing_package(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    for made in (client.steps().to_pandas, client.trajectories().to_polars):
        with pytest.raises(ConfigError, match=r"pip install (pandas|polars)"):
            made()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_an_agent_outside_plays_in_a_live_run(tmp_path: Path) -> None:
    changes = ("trainer.max_steps=2000", "services.env.unsandboxed=[echo, broken]")
    with training(tmp_path, *changes, simulated=True) as going:
        going.wait_for(r"^step +1/", 100)
        with Client(going.folder.path) as client:
            play(client)
        asyncio.run(play_async(going))
        with pytest.raises(Unauthorized):
            Client(env=Client(going.folder.path)._client.address("env", "admin")[0], token="x" * 20).environments()


def play(client: Client) -> None:
    with pytest.raises(InputError, match="rejected"):
        client.submit(code="import nothing_of_this_name\n", name="broken")
    row = client.submit(code=EXTERNAL, name="echo", weight=1)
    assert row["state"] in ("canary", "active")
    assert client.environment("echo")[0]["name"] == "echo@1"
    with pytest.raises(NotFound):
        client.claim("other", wait_s=0)
    tickets = set()
    for n in range(6):
        with client.session("echo", wait_s=60) as session:
            tickets.add(session.ticket)
            assert session.messages[0]["content"].startswith("say ")
            assert session.chat(list(session.messages))["role"] == "assistant"
            session.end("done")
            session.reward(float(n % 2), success=bool(n % 2))
        assert session.describe()["state"] in ("ended", "trained")
        assert session.key not in repr(session)
    with pytest.raises(RuntimeError, match="mine"), client.session("echo", wait_s=60) as session:
        raise RuntimeError("mine")
    assert session.describe()["state"] == "void"
    assert client.retire("echo@1")["state"] == "retired"
    drain(client)
    steps = [event.record["step"] for event in take(client.follow(), "step", 2)]
    assert steps[1] > steps[0]
    assert tickets & {row["ticket"] for row in client.trajectories(env="echo").rows}


def drain(client: Client) -> None:
    """Play all tasks that wait for an agent: the trainer waits for whole groups."""
    with suppress(Unavailable, NotFound):
        while True:
            with client.session(wait_s=3) as session:
                session.chat(list(session.messages))
                session.end("drained")
                session.reward(0.0)


def take(events: Iterator[Any], kind: str, n: int) -> list[Any]:
    found = []
    while len(found) < n:
        event = next(events)
        found += [event] if event.kind == kind else []
    return found


async def play_async(going: Training) -> None:
    client = AsyncClient(going.folder.path)
    assert (await client.status())["state"] == "running"
    async for event in client.follow():
        if event.kind == "ticket":
            break
    assert len(await client.trajectories()) > 0
