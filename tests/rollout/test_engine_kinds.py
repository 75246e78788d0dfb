"""A second kind of engine, which lacks capabilities: what is refused, and what the server says of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.rollout.app import open_rollout
from services.rollout.engines.base import Arriving, Engine, EngineSpec
from services.rollout.engines.staged import CommitMode, CommitResult, Live, LoadedWeights, StagedWeights
from services.rollout.settings import RolloutSettings, from_config
from services.rollout.weights.updater import WeightUpdater
from shared import engine_kinds
from shared.config import validate
from shared.engine_kinds import CAPABILITIES, Capability, EngineKind
from shared.engines import DeclaredEngine
from shared.errors import ConfigError, InputError
from shared.models.config import ModelConfig
from shared.schema import RunConfig
from tests.support import models
from tests.support.engine import FakeEngine

PLAIN: tuple[Capability, ...] = ("exact_ids",)
CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
V1, V2 = "e000001-s000001", "e000001-s000002"


@dataclass
class PlainEngine(FakeEngine):
    """Serves weights, and can prove nothing of them."""

    n_audits: int = 0

    async def stage(self, weights: StagedWeights, arriving: Arriving | None = None) -> LoadedWeights:
        return replace(await super().stage(weights, arriving), checksum="")

    async def commit(self, version: str, mode: CommitMode) -> CommitResult:
        return replace(await super().commit(version, mode), live=Live(version, ""))

    async def audit(self) -> Live:
        self.n_audits += 1
        return Live(self.version, "")


@asynccontextmanager
async def open_plain(_: EngineSpec) -> AsyncIterator[Engine]:
    yield PlainEngine()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds the kind `plain`."""

    def add(*capabilities: Capability) -> None:
        kind = EngineKind("tests.rollout.test_engine_kinds:open_plain", capabilities)
        monkeypatch.setitem(engine_kinds.OWN, "plain", kind)

    return add


def configured(folder: Path, **changed: Any) -> RunConfig:
    """A run whose engine is of the kind `plain`."""
    models.write_hf(folder, models.tiny_config(**changed.pop("hf", {})))
    tree = {"model": {"path": str(folder)}, "data": {"env": "x"}, "run": {"name": "test", "dir": str(folder)}} | changed
    return validate({**tree, "rollout": {**tree.get("rollout", {}), "engine": {"kind": "plain"}}}).config


EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
ABORT = {"rollout": {"update_mode": "abort"}}


@pytest.mark.parametrize(
    ("lacks", "changed", "key"),
    [
        ("exact_ids", {}, "mode=rl"),
        ("spans", {}, "rollout.update_mode=retract"),
        ("in_flight_update", {"rollout": {"update_mode": "in_place"}}, "rollout.update_mode=in_place"),
        ("routing", {"hf": EXPERTS}, "model.routing_replay=true"),
    ],
)
def test_a_setting_that_needs_a_capability_is_refused_at_the_start(
    tmp_path: Path, register: Callable[..., None], lacks: Capability, changed: dict[str, Any], key: str
):
    register(*(one for one in CAPABILITIES if one != lacks))
    with pytest.raises(ConfigError) as refused:
        from_config(configured(tmp_path, **changed))
    assert refused.value.detail == f"{key} needs {lacks}, which rollout.engine.kind=plain does not have"


@pytest.mark.parametrize(
    ("lacks", "changed"),
    [
        (("spans", "in_flight_update"), ABORT),
        (("routing",), {}),  # a dense model
        (("audit", "probe"), {}),
    ],
)
def test_what_no_setting_needs_may_be_lacking(
    tmp_path: Path, register: Callable[..., None], lacks: tuple[Capability, ...], changed: dict[str, Any]
):
    register(*(one for one in CAPABILITIES if one not in lacks))
    assert from_config(configured(tmp_path, **changed)).kind == "plain"


def test_experts_that_nobody_replays_need_no_routing(tmp_path: Path, register: Callable[..., None]):
    register(*(one for one in CAPABILITIES if one != "routing"))
    config = configured(tmp_path, hf=EXPERTS)
    from_config(config.model_copy(update={"model": config.model.model_copy(update={"routing_replay": False})}))


@asynccontextmanager
async def served(settings: RolloutSettings) -> AsyncIterator[tuple[httpx.AsyncClient, WeightUpdater]]:
    async with open_rollout(settings) as service:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            yield http, service.app.state.rollout.updates


async def test_the_server_tells_its_engine_and_commits_only_as_it_can(tmp_path: Path, register: Callable[..., None]):
    register(*PLAIN)
    told = DeclaredEngine("plain", PLAIN).to_json()
    settings = replace(from_config(configured(tmp_path, **ABORT)), trainer_url=None)
    assert settings.weights_root is not None
    model = models.tiny_config()
    root = settings.weights_root
    first, second = (models.write_checkpoint(root, v, model, models.random_weights(model, 0)) for v in (V1, V2))
    settings = replace(settings, redis_url=None)
    async with served(settings) as (http, updates):
        assert (await http.get("/get_server_info")).json()["engine"] == told
        done = await http.post("/update_weights", json={"manifest": str(first)})
        assert (done.json()["version"], done.json()["engine"]) == (V1, told)
        for path, body in (
            ("/update_weights", {"manifest": str(second), "mode": "retract"}),
            ("/weights/commit", {"version": V2, "mode": "in_place"}),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 422
            assert "needs in_flight_update, spans" in refused.json()["detail"]
        assert (updates.current, updates.staged) == (V1, None)
        await updates.audit()
        engine = updates.engine
        assert isinstance(engine, PlainEngine)
        assert (engine.n_audits, engine.modes, updates.current) == (2, ["abort"], V1)
        engine.version = V2  # as if the server had been restarted
        await updates.audit()
        assert updates.current is None


async def test_a_mode_that_the_engine_lacks_stages_nothing(tmp_path: Path):
    engine = PlainEngine()
    updates = WeightUpdater(
        engine, tmp_path, ModelConfig.parse(CONFIG), "test", "abort", declared=DeclaredEngine("plain", PLAIN)
    )
    path = models.write_checkpoint(tmp_path, V1, CONFIG, models.random_weights(CONFIG, 0))
    with pytest.raises(InputError):
        await updates.update(str(path), "retract")
    assert (engine.staging, engine.modes) == ([], [])
