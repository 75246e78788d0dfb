"""A service that is only a row of the table and a schema: what starts, finds, asks and names services follows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import create_model

from shared.clients.base import HttpClient
from shared.config import LoadedConfig, load
from shared.errors import ConfigError, Unauthorized
from shared.run.folder import RunFolder
from shared.services import SERVICES, ServiceInfo
from shared.services_schema import Endpoint, ServicesSection
from volley.local import external, stack
from volley.local.processes import Reaper
from volley.local.stack import LocalStack, StackSeams
from volley.local.supervisor import RestartPolicy
from volley.runs import addresses
from volley.runs.record import claimed
from volley_commands import access, evaluate
from volley_python.diagnosis import identity, observing, wedge
from volley_python.diagnosis.wedge import ServiceReport

SCORER = ServiceInfo("scorer", 8105, "base", 30.0, ("env",), ("/scores",), run_key="run")
FAKES = StackSeams(dict.fromkeys((*SERVICES, SCORER.name), "tests.support.fake_service"))


class ScorerEndpoint(Endpoint):
    port: int = SCORER.port


def with_scorer(known: type[ServicesSection]) -> type[ServicesSection]:
    """The section, with those of packages and the new service."""
    return create_model("WithScorer", __base__=known, scorer=(ScorerEndpoint, ScorerEndpoint()))


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVICES, SCORER.name, SCORER)  # type: ignore[arg-type]


def loaded_with(tmp_path: Path, *overrides: str) -> LoadedConfig:
    loaded = load(["configs/chaos.yaml"], [f"run.dir={tmp_path}", "run.name=scored", *overrides])
    known = loaded.config.services
    services = with_scorer(type(known)).model_validate(known.model_dump())
    return replace(loaded, config=loaded.config.model_copy(update={"services": services}))


@dataclass(frozen=True)
class Started:
    folder: RunFolder
    stack: LocalStack


@asynccontextmanager
async def started(loaded: LoadedConfig) -> AsyncIterator[Started]:
    with claimed(loaded) as claim, Reaper.running() as reaper:
        async with stack.running(loaded, claim.folder, reaper, print, RestartPolicy(), FAKES) as running:
            yield Started(claim.folder, running)


@pytest.mark.timeout(120)
async def test_it_is_started_supervised_asked_and_told_from_strangers(tmp_path: Path):
    loaded = loaded_with(tmp_path)
    async with started(loaded) as run:
        (member,) = (one for one in run.stack.kept if one.name == "scorer")
        async with run.stack.client("scorer") as scorer:
            assert (await scorer.get("/scores"))["path"] == "/scores"
        async with HttpClient(run.stack.urls["scorer"]) as nobody:
            with pytest.raises(Unauthorized):
                await nobody.get("/scores")

        found = addresses.read(run.folder)
        assert (await identity.find_answering(run.folder, found)) == dict.fromkeys(run.stack.urls, True)
        seen, _ = await observing.of_run(run.folder)
        (report,) = (one for one in seen if one.kind == "scorer")
        assert (report.error, report.not_ready, report.facts["path"]) == (None, None, "/scores")
        assert access.variables(run.folder, found)["VOLLEY_SCORER_URL"] == run.stack.urls["scorer"]

        assert member.child is not None
        first = member.child.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60), run.stack.client("scorer") as scorer:
            while not member.ends or member.child is None or member.child.pid == first:
                await asyncio.sleep(0.05)
            assert (await scorer.get("/scores", attempts=20))["path"] == "/scores"
    assert (run.folder.logs / "scorer.log").is_file()
    async with started(loaded) as again:
        assert again.stack.urls["scorer"] == run.stack.urls["scorer"]


async def test_a_run_of_its_own_on_the_same_port_is_a_stranger(tmp_path: Path):
    async with started(loaded_with(tmp_path / "one")) as one, started(loaded_with(tmp_path / "two")) as two:
        found = addresses.read(one.folder)
        stolen = found.model_copy(update={"urls": found.urls | {"scorer": two.stack.urls["scorer"]}})
        known = await identity.find_answering(one.folder, stolen)
    assert [name for name, ours in known.items() if not ours] == ["scorer"]


def test_it_is_none_of_others_and_has_its_settings_in_a_run_that_only_evaluates(tmp_path: Path):
    services = loaded_with(tmp_path).config.services
    named = services.model_copy(update={"scorer": ScorerEndpoint(url="http://far:1")})
    with pytest.raises(ConfigError, match=r"services\.scorer\.url is set"):
        external.find(named)
    assert addresses.followed(named)["scorer"] == "http://far:1"
    alone = evaluate._alone()
    assert (alone["services.scorer.port"], alone["services.scorer.url"]) == (0, None)


def test_one_that_serves_several_runs_or_is_replicated_may_be_that_of_others(monkeypatch: pytest.MonkeyPatch):
    section = with_scorer(ServicesSection)
    services = section.model_validate({"scorer": {"url": "http://far:1/"}})
    monkeypatch.setitem(SERVICES, "scorer", replace(SCORER, shared=True))  # type: ignore[arg-type]
    assert (external.find(services), services.n_local("scorer")) == ({"scorer": "http://far:1"}, 0)

    class Several(section):
        scorer_urls: tuple[str, ...] = ()
        scorer_replicas: int = 2

    monkeypatch.setitem(SERVICES, "scorer", replace(SCORER, replicated=True))  # type: ignore[arg-type]
    assert Several().n_local("scorer") == 2
    fixed = Several(scorer_urls=("http://a/", "http://b"))
    assert external.find(fixed) == {"scorer-0": "http://a", "scorer-1": "http://b"}
    assert fixed.n_local("scorer") == 0
    assert evaluate._alone()["services.scorer_urls"] == []


def test_whoever_waits_for_it_is_told_why_it_does_not_go_on():
    waiting = {"state": "running", "quiet_s": 90.0, "waiting": {"on": "scorer", "why": "no scores"}}
    seen = [
        ServiceReport("orchestrator", "orchestrator", facts=waiting),
        ServiceReport("scorer", "scorer", not_ready="loading"),
    ]
    verdict = wedge.diagnose(seen)
    assert set(verdict.chain) == {"orchestrator waits for scorer: no scores", "scorer is not ready: loading"}
    assert verdict.state == "wedged"
