"""Values of the chart, read from its files: they fit its schema, and their configuration is Volley's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shared import config
from shared.services import SERVICES

ROOT = Path(__file__).resolve().parents[2]
HELM = ROOT / "deploy" / "helm"
CHART = HELM / "volley"
VALUES = sorted(HELM.glob("values-*.yaml"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def values_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def merged(base: Any, over: Any) -> Any:
    """Values as Helm merges them: a null removes a default."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    whole = {key: merged(base.get(key), over[key]) if key in over else base[key] for key in base | over}
    return {key: value for key, value in whole.items() if key not in over or over[key] is not None}


def closed(schema: dict[str, Any], values: Any, at: str = "") -> list[str]:
    """Return the default values that the schema does not know."""
    found = schema.get("properties")
    if not isinstance(values, dict) or found is None or schema.get("additionalProperties", True):
        return []
    unknown = [f"{at}.{key}" for key in values if key not in found]
    return unknown + [one for key in values if key in found for one in closed(found[key], values[key], f"{at}.{key}")]


def test_four_kinds_of_clusters_have_values() -> None:
    assert [path.stem for path in VALUES] == ["values-gpu", "values-local", "values-multislice-spot", "values-tpu-v5e"]


@pytest.mark.parametrize("path", [CHART / "values.yaml", *VALUES], ids=lambda path: path.stem)
def test_values_fit_the_schema(path: Path) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(merged(DEFAULTS, values_of(path)))
    assert closed(SCHEMA, values_of(path)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollout": {"replicas": 0}},
        {"rollout": {"autoscaling": {"minReplicas": 0}}},
        {"rollout": {"replica": 2}},
        {"trainer": {"storage": {"kind": "nfs"}}},
        {"trainer": {"hosts": 1.5}},
        {"trainer": {"storage": {"size": "100 GB"}}},
        {"env": {"resources": {"limits": {"memory": None}}}},
        {"trainer": {"storage": {"size": "100K"}}},
        {"trainer": {"backoffLimit": 2**31}},
        {"env": {"resources": {"limits": {"cpu": "two"}}}},
        {"env": {"resources": {"limits": {"cpu": -1}}}},
        {"redis": {"url": "redis://user:password@host:6379"}},
        {"redis": {"url": "redis://host #"}},
        {"configFiles": []},
        {"configFiles": ["run.yaml; true"]},
        {"bucket": "gs://b/p"},
        {"config": None},
        {"config": {"run": "quickstart"}},
        {"config": {"services": []}},
        {"trainer": {"storage": None}},
        {"trainer": {"storage": {"kind": None}}},
    ],
    ids=json.dumps,
)
def test_schema_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(merged(DEFAULTS, wrong))


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_configuration_of_the_values_is_accepted(path: Path) -> None:
    values = merged(DEFAULTS, values_of(path))
    layers = [ROOT / name for name in values["configFiles"]]
    assert all(layer.is_relative_to(ROOT / "configs") for layer in layers), "the images hold no other"
    loaded = config.load([*layers, ROOT / "docker" / "stack.yaml"], given=values["config"])
    assert loaded.config.run.name == values["config"]["run"]["name"]
    engine, limits = loaded.config.rollout.engine, values["rollout"]["resources"]["limits"]
    chips = limits.get("google.com/tpu", limits.get("nvidia.com/gpu", engine.tp_size))
    assert chips == engine.tp_size
    hosts = values["trainer"]["hosts"] * values["trainer"]["slices"]
    limits = values["trainer"]["resources"]["limits"]
    assert limits.get("google.com/tpu", 1) * hosts == loaded.config.trainer.mesh.n_devices


def test_start_probes_outlast_the_time_that_volley_gives_each_service() -> None:
    for name, service in SERVICES.items():
        assert DEFAULTS[name]["startSeconds"] >= service.start_s, name


def test_redis_of_the_chart_is_configured_as_that_of_compose() -> None:
    found = []
    for path in (ROOT / "compose.yaml", CHART / "templates" / "redis.yaml"):
        block = re.search(r"<<CONFIG\n(.*?)\n\s*CONFIG", path.read_text(encoding="utf-8"), re.DOTALL)
        assert block is not None, path
        found.append([line.strip().replace("$$", "$") for line in block[1].splitlines()])
    assert found[0] == found[1]
    assert "maxmemory-policy noeviction" in found[0]


def test_chart_takes_rules_and_dashboard_from_their_one_source() -> None:
    observability = ROOT / "docker" / "observability"
    assert {path.name: path.resolve() for path in (CHART / "files").iterdir()} == {
        name: observability / name for name in ("alerts.yaml", "grafana.json")
    }
