"""The table of services is the only place that lists them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from shared.services import SERVICES, ServiceName, kind_of
from shared.services_schema import Endpoint, ServicesSection

ROOT = Path(__file__).parents[2]
TABLE = Path("shared/services.py")
SCANNED = ("services", "shared", "tools/chaos", "tools/soak", "tools/simulated")
"""The other tools are run by name of a virtual environment, which may be that of a service."""
OTHER = {
    Path("tools/chaos/arena.py"): "programs that stand in for services",
    Path("tools/soak/judgement.py"): "what libraries leak",
}
"""Files whose lists are none of services."""


def lists(source: str) -> Iterator[list[str]]:
    """Yield the service names in each list, tuple, set or dictionary of a program that has two or more of them."""
    for node in ast.walk(ast.parse(source)):
        parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        named = {kind_of(one.value) for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        if len(found := sorted(named & SERVICES.keys())) > 1:
            yield found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("for name in ('env', 'trainer'): ...", [["env", "trainer"]]),
        ("type T = Literal['rollout', 'trainer', 'redis']", [["rollout", "trainer"]]),
        ("x = {'env': 1, **y, 'orchestrator': 2}", [["env", "orchestrator"]]),
        ("x = kind in {'rollout-0', 'trainer'}", [["rollout", "trainer"]]),
        ("x = ('trainer', 'peer'), ['step', 'env'], 'env rollout'", []),
    ],
)
def test_lists_of_services_are_found(source: str, found: list[list[str]]):
    assert list(lists(source)) == found


def test_no_other_file_lists_the_services():
    files = [path for part in SCANNED for path in (ROOT / part).rglob("*.py")]
    found = {path.relative_to(ROOT): list(lists(path.read_text(encoding="utf-8"))) for path in files}
    assert len(found) > 300
    listing = {path: names for path, names in found.items() if names}
    assert listing.pop(TABLE)
    assert {str(path): names for path, names in listing.items() if path not in OTHER} == {}
    assert listing.keys() == OTHER.keys(), "an exception that nothing needs"


def test_every_row_has_its_name_its_schema_and_its_folder():
    assert set(get_args(ServiceName.__value__)) == SERVICES.keys()
    endpoints = {name for name, field in ServicesSection.model_fields.items() if isinstance(field.default, Endpoint)}
    assert endpoints == SERVICES.keys()
    for name, info in SERVICES.items():
        assert (name, getattr(ServicesSection(), name).port) == (info.name, info.port)
        assert (ROOT / "services" / name / "__main__.py").is_file()
        assert set(info.needs) < SERVICES.keys()
    assert len({info.port for info in SERVICES.values()}) == len(SERVICES)


def test_processes_are_named_by_service_and_number():
    names = [SERVICES[name].process(i) for name in ("env", "rollout", "trainer") for i in (0, 1)]
    assert names == ["env", "env-1", "rollout-0", "rollout-1", "trainer", "trainer-1"]
    assert [kind_of(name) for name in names] == ["env", "env", "rollout", "rollout", "trainer", "trainer"]
