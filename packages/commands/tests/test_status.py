"""`volley status` over services that answer HTTP: from a run's folder with a viewer's token, from addresses, as text
and as JSON.
"""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import orjson
import pytest

from shared.engines import DeclaredEngine
from shared.errors import ConfigError
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services_schema import Limits, TokenFiles
from shared.web.access import Role, read_tokens
from shared.web.http import create_app
from tests.support.asgi import served
from volley.commands import train
from volley.local.stack import LocalStack
from volley.printing import json_output
from volley_commands import status
from volley_commands.status import _text
from volley_python.diagnosis import observing, wedge
from volley_python.diagnosis.wedge import QUIET_S, ServiceReport

TRAINER = {
    "phase": "waiting",
    "waits": [{"on": "orchestrator", "why": "groups: 1 of 8 are here"}],
    "step": 12,
    "max_steps": 99,
    "durable_step": 12,
}
RUN = {"state": "running", "waits": {"rollout": 4}, "quiet_s": QUIET_S, "servers": [], "queue": {}}
ROUTES = {
    "trainer": {"/status": TRAINER},
    "orchestrator": {"/runs": [RUN]},
    "rollout-0": {"/weights": {}, "/get_server_info": {}},
    "env": {},
}


def app_of(name, answers, tokens=None, ready=None):
    app = create_app(
        name.partition("-")[0],
        limits=Limits(),
        tokens=tokens,
        ready=lambda: ready,
        roles=dict.fromkeys((f"GET {path}" for path in answers), Role.VIEWER),
    )
    for path, answer in answers.items():
        app.get(path)(lambda answer=answer: answer() if callable(answer) else answer)
    return app


@asynccontextmanager
async def stack(tokens=None, **changed):
    async with AsyncExitStack() as entered:
        routes = ROUTES | changed
        yield {
            name: await entered.enter_async_context(served(app_of(name, answers, tokens)))
            for name, answers in routes.items()
        }


def folder_with(tmp_path, urls):
    files = {}
    for role in ("viewer", "service", "admin"):
        files[role] = tmp_path / role
        files[role].write_text(f"{role}-0123456789abcdef", encoding="utf-8")
        files[role].chmod(0o600)
    record = {"urls": urls, "token_files": {role: str(path) for role, path in files.items()}, "ca_file": None}
    (tmp_path / "processes.json").write_bytes(orjson.dumps(record))
    return TokenFiles(**files)


async def show(*targets, **options):
    return await asyncio.to_thread(status.main, [str(target) for target in targets], **options)


async def test_a_wedge_is_shown_from_the_runs_folder_with_a_viewers_token(tmp_path, capsys):
    tokens = read_tokens(folder_with(tmp_path, {}))
    async with stack(tokens) as urls:
        folder_with(tmp_path, urls)
        trust.accept(RunFolder(tmp_path))
        assert await show(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "the run is wedged, nothing has advanced for 60 s" in shown
    assert (
        "← trainer waits for groups: 1 of 8 are here\n  ← orchestrator waits for answers of rollout servers (4"
        " requests)" in shown
    )


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, "the run is waiting; "),
        (
            {"rollout-0": {"/weights": {}, "/get_server_info": {"internal_state": {"paused": True}}}},
            "the run is wedged; ",
        ),
    ],
)
async def test_progress_calls_a_run_wedged_only_for_a_fault(changed, shown):
    async with stack(**changed) as urls:
        told = await train._waiting(LocalStack(urls, None, None, []), "wedged")
    assert told.startswith(shown)


async def test_how_far_the_bucket_follows_is_shown(capsys):
    async with stack(trainer={"/status": TRAINER | {"bucket": "s3://b/r", "bucket_step": 9}}) as urls:
        await show(*urls.values())
    assert "the run's bucket has step 9 of 12" in capsys.readouterr().out
    async with stack(trainer={"/status": TRAINER | {"bucket": "s3://b/r", "bucket_step": None}}) as urls:
        await show(*urls.values())
    assert "the run's bucket has nothing yet" in capsys.readouterr().out


async def test_machines_short_of_memory_are_named_once_each(capsys):
    memory = {"host": "h1", "on": "this container", "total": 8 << 30, "available": 1 << 28, "swap_total": 0}
    memory |= {"swap_free": 0, "waited": 0.24}
    changed = {
        "trainer": {"/status": TRAINER | {"host_memory": memory}},
        "orchestrator": {"/runs": [RUN | {"host_memory": memory | {"available": 2 << 28}}]},
        "rollout-0": {"/weights": {}, "/get_server_info": {"host_memory": memory | {"host": "h2", "waited": None}}},
        "env": {},
    }
    async with stack(**changed) as urls:
        await show(*urls.values())
        shown = capsys.readouterr().out
        with json_output():
            await show(*urls.values())
    told = [line for line in shown.splitlines() if "is short of memory" in line and "(h" in line]
    assert len(told) == 2
    assert "of 8.0 GiB are available; programs waited for memory 24% of the last minute" in told[0]
    assert [f"warning: {one}" for one in orjson.loads(capsys.readouterr().out)["warnings"]][:2] == told


async def test_an_engine_without_all_capabilities_is_named(capsys):
    for engine, told in (
        (DeclaredEngine("sglang_jax"), False),
        (DeclaredEngine("plain", ("exact_ids", "spans", "in_flight_update", "routing")), True),
    ):
        described = {"/weights": {"current": "e000001-s000002"}, "/get_server_info": {"engine": engine.to_json()}}
        async with stack(**{"rollout-0": described}) as urls:
            await show(*urls.values())
        shown = capsys.readouterr().out
        assert "current e000001-s000002" in shown
        assert ("engine plain (without audit, probe)" in shown) == told


async def test_addresses_say_what_they_are_and_json_is_for_programs(capsys):
    async with stack() as urls:
        with json_output():
            assert await show(*urls.values()) == 1
    told = orjson.loads(capsys.readouterr().out)
    assert (told["state"], told["quiet_s"], told["chain"][0]) == (
        "wedged",
        QUIET_S,
        "trainer waits for groups: 1 of 8 are here",
    )
    assert [s["name"] for s in told["services"]] == ["trainer", "orchestrator", urls["rollout-0"], "env"]
    assert all(s["ready"] for s in told["services"])


async def test_a_server_that_makes_tokens_keeps_a_quiet_run_from_being_wedged(capsys, monkeypatch):
    monkeypatch.setattr(observing, "_BETWEEN_S", 0.05)
    made = iter(range(100, 10_000, 50))
    engine = {
        "/weights": {},
        "/get_server_info": lambda: {"internal_state": {"running": 4, "output_tokens": next(made)}},
    }
    async with stack(**{"rollout-0": engine}) as urls:
        assert await show(*urls.values()) == 0
    assert "the run is running" in capsys.readouterr().out
    stalls = iter([100] * 3)
    engine = {
        "/weights": {},
        "/get_server_info": lambda: {"internal_state": {"running": 4, "output_tokens": next(stalls, 150)}},
    }
    async with stack(**{"rollout-0": engine}) as urls:
        assert await show(*urls.values()) == 0
    hung = {"/weights": {}, "/get_server_info": {"internal_state": {"running": 4, "output_tokens": 100}}}
    async with stack(**{"rollout-0": hung}) as urls:
        assert await show(*urls.values()) == 1
    assert "has 4 requests and produces no tokens" in capsys.readouterr().out


async def test_a_missing_token_is_said(tmp_path, capsys):
    tokens = read_tokens(folder_with(tmp_path, {}))
    async with stack(tokens) as urls:
        await show(urls["trainer"])
        shown = capsys.readouterr().out
        assert "missing or wrong bearer token" in shown
        assert "the state of the run is unknown" in shown
        assert "has stopped" not in shown
        await show(urls["trainer"], token_file=tmp_path / "viewer")
        assert "phase waiting" in capsys.readouterr().out


def test_a_folder_without_processes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        status.main([str(tmp_path)])


def test_what_the_orchestrator_warns_about_is_printed():
    said = {"state": "running", "warnings": ["adder@2: at turn 3, 4 of the 4 attempts that reached it failed"]}
    seen = [ServiceReport("orchestrator", "orchestrator", "http://one", facts=said)]
    assert "warning: adder@2: at turn 3, 4 of the 4 attempts" in _text(seen, wedge.diagnose(seen))
