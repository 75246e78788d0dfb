"""The page of SGLang's routes and fields says what the code does."""

import json
import re

import pytest

from services.rollout.api import generate, routes
from tests.docs.commands import ROOT
from volley_serving.sglang import control
from volley_serving.sglang.control import DISK_FIELDS, DISK_NEUTRAL
from volley_serving.sglang.generate_body import FIELDS, LABELS, NEUTRAL_FIELDS, PER_PROMPT
from volley_serving.sglang.sampling import NEUTRAL, OPTIONAL, SAMPLING

PAGE = (ROOT / "docs" / "serving-sglang.md").read_text(encoding="utf-8")


def section(heading):
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def tables(heading):
    """Tables of a section, as rows of the quoted words of each cell; the last cell of a row is plain text."""
    found, rows = [], None
    for line in section(heading).splitlines():
        if line.startswith("|---"):
            found.append(rows := [])
        elif not line.startswith("|"):
            rows = None
        elif rows is not None:
            cells = line.split("|")[1:-1]
            rows.append(([re.findall("`([^`]+)`", cell) for cell in cells], cells[-1].strip()))
    return found


def test_the_page_names_every_route_and_its_role():
    there, refused = tables("Routes")
    declared = {**control.ROLES, **generate.ROLES}
    declared = {route: role for route, role in declared.items() if route.partition(" ")[2] not in control.REFUSED}
    of_sglang = ("POST /abort_request", "GET /server_info", "GET /get_server_info")
    declared |= {route: routes.ROLES[route] for route in of_sglang}
    assert {route: role for (names, *_), role in there for route in names} == {
        route: str(role) for route, role in declared.items()
    }
    assert [path for (names, *_), _ in refused for path in names] == [*control.REFUSED]


@pytest.mark.parametrize(
    ("heading", "honoured", "neutral"),
    [
        ("Fields of /generate", FIELDS, NEUTRAL_FIELDS),
        ("Sampling parameters", SAMPLING | OPTIONAL.keys(), NEUTRAL),
        ("Weights", DISK_FIELDS, DISK_NEUTRAL),
    ],
)
def test_the_page_names_every_field(heading, honoured, neutral):
    meanings, values = tables(heading)
    assert sorted(name for (names, *_), _ in meanings for name in names) == sorted(honoured)
    listed = {name: [*map(json.loads, found)] for (found, names), _ in values for name in names}
    assert listed == {name: _written(allowed) for name, allowed in neutral.items()}


def _written(allowed):
    """Values as the page lists them: null only where there is no other."""
    return sorted((one for one in allowed if one is not None), key=json.dumps) or [None]


def test_the_page_names_fields_that_change_nothing_and_those_of_each_prompt():
    text = section("Fields of /generate")
    assert set(re.findall("`([^`]+)`", text.partition("changes nothing: ")[2].partition(".\n")[0])) == LABELS
    listed = set(re.findall("`([^`]+)`", text.partition("The fields ")[2].partition(" may then")[0]))
    assert listed == (PER_PROMPT & FIELDS) | {"rid"}
