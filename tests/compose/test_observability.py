"""Files for Prometheus and Grafana name only metrics and labels that the services have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shared import packages
from shared.services import SERVICES
from tests.compose import compose_file
from tests.compose.dashboard import FOLDER, panels, rules
from tests.fuzz.stack import OPENERS
from tools.docs import service

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"\bvolley_\w+")
_LABELS = re.compile(r"by \(([^)]*)\)|\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
_COMMON = {"instance", "job", "le"}


def metrics() -> dict[str, set[str]]:
    """Names of series as Prometheus sees them, with their labels."""
    assert OPENERS, "their import defines the core's metrics"
    assert packages.part("environments")
    for group in (packages.AGENTS, packages.ROUTERS):
        assert [packages.load(point) for point in packages.found(group).values()]
    return {
        metric["name"] + suffix: set(metric["labels"])
        for metric in service.metrics()
        for suffix in (("_bucket", "_sum", "_count") if metric["type"] == "histogram" else ("",))
    }


def test_each_expression_uses_metrics_and_labels_that_exist() -> None:
    known, n = metrics(), 0
    for expression, shown in (*rules(), *panels()):
        names = set(_NAME.findall(expression))
        assert names <= known.keys(), expression
        labels = {one for name in names for one in known[name]} | _COMMON
        for several, single in _LABELS.findall(f"{expression} {shown}"):
            assert {one.strip() for one in (several or single).split(",")} <= labels, (expression, shown)
        n += 1
    assert n > 30


def test_every_service_of_the_stack_is_scraped_and_every_replica() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus-compose.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["job_name"] == "volley", "as the alert rules name it"
    fixed = {target for group in job["static_configs"] for target in group["targets"]}
    found = {f"{name}:{group['port']}" for group in job["dns_sd_configs"] for name in group["names"]}
    single = {f"{info.name}:{info.port}" for info in SERVICES.values() if not info.replicated}
    assert fixed == single
    assert found == {f"{info.name}:{info.port}" for info in SERVICES.values() if info.replicated}


def test_grafana_finds_its_source_and_the_dashboard() -> None:
    (source,) = yaml.safe_load((FOLDER / "datasource.yaml").read_text(encoding="utf-8"))["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    services = compose_file.services()
    mounts = [mount.split(":")[:2] for mount in services["grafana"]["volumes"]]
    assert ["./docker/observability/grafana.json", f"{provider['options']['path']}/grafana.json"] in mounts


def test_panels_do_not_overlap() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        taken |= cells
        assert at["x"] + at["w"] <= 24


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    shutil.copytree(FOLDER, tmp_path / "files")
    (tmp_path / "files" / "token_viewer").write_text("t" * 32, encoding="utf-8")
    for command in (
        ["check", "config", "prometheus.yaml"],
        ["check", "config", "--syntax-only", "prometheus-compose.yaml"],
        ["check", "rules", "alerts.yaml"],
    ):
        done = subprocess.run([promtool, *command], cwd=tmp_path / "files", capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
