"""References of the documentation site: complete, made from the code, and each with a place on a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shared import errors
from shared.schema import RunConfig
from shared.services import SERVICES
from tests.docs.commands import PAGES, ROOT
from tools.docs import reference, site
from tools.docs.keys import Chapter, chapters
from volley.__main__ import all_commands
from volley_commands.configuration import schema


@pytest.fixture(scope="module")
def keys() -> dict[str, Chapter]:
    return {chapter.path: chapter for chapter in chapters(schema())}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_key_of_a_configuration_is_listed_with_its_default(keys: dict[str, Chapter]) -> None:
    run = RunConfig.model_validate({"model": {"path": "m"}, "data": {"env": "frozen_lake"}})
    listed = {f"{path}.{row[0]}".lstrip(".") for path, chapter in keys.items() for row in chapter.rows}
    assert {*leaves(run.model_dump(mode="json"))} <= listed
    assert ("max_steps", "integer > 0", "10", "all") in keys["trainer"].rows
    assert ("epsilon_high", "number > 0 | null", "0.28", "dapo") in keys["algorithm"].rows
    assert ("rank", "integer > 0", "16", "all") in keys["trainer.lora"].rows


def test_every_command_and_every_error_is_listed() -> None:
    text = reference.commands()
    assert {*all_commands()} == {name.split()[0] for name in re.findall(r"^### `volley (.+)`$", text, re.MULTILINE)}
    assert "--from-step" in text
    classes = {one.__name__ for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)}
    assert classes == set(re.findall(r"^\| `(\w+)` \|", reference.error_classes(), re.MULTILINE))


def test_metrics_are_grouped_by_the_services_that_serve_them() -> None:
    one, both = ({"name": name, "type": "gauge", "labels": [], "meaning": "a|b"} for name in ("one", "both"))
    text = reference.metrics({"env": [both], "trainer": [one, both]})
    assert text.splitlines()[0] == "### Every service"
    assert re.findall(r"`(\w+)`", text) == ["both", "one"]
    assert "a\\|b" in text


def test_routes_of_a_service_are_those_it_answers_with_their_roles() -> None:
    found = reference._described("env")
    table = reference.routes(found["openapi"])
    assert "| `POST /episodes` | service |" in table
    assert "| `GET /health` | anyone |" in table
    assert {"volley_env_episodes", "volley_http_request_seconds"} <= {one["name"] for one in found["metrics"]}


def test_each_reference_has_one_place_on_a_page() -> None:
    places = [name for page in PAGES for name in site.MARKER.findall(page.read_text(encoding="utf-8"))]
    assert sorted(places) == sorted(
        ["configuration", "commands", "errors", "metrics", *(f"routes-{s}" for s in SERVICES)]
    )


def test_links_out_of_the_documentation_become_names() -> None:
    text = "[schema](../shared/schema.py), [`configs/`](../configs), [runs](runs.md), <!-- no reference -->"
    assert site.without_outside_links(text) == "`shared/schema.py`, `configs/`, [runs](runs.md), <!-- no reference -->"


def test_the_index_is_the_navigation_with_groups_inside_its_sections() -> None:
    index = "## One: a\n\n| [a.md](a.md) | x |\n\n## Two\n\n### In\n\n| [b.md](b.md) | y |\n\n## Three\n\ntext\n"
    assert site.navigation(index) == [{"One": ["a.md"]}, {"Two": [{"In": ["b.md"]}]}]
    sections = site.navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sections[0]["Tutorial"][1] == "recipes.md"
    assert len(sections[1]["How-to"]) == 5


def test_the_reference_of_keys_has_the_words_that_a_search_looks_for() -> None:
    text = reference.configuration()
    assert "learning rate" in text.partition("### `trainer.optimizer_config`")[2].partition("### ")[0]
    assert {page.name for page in PAGES} >= site.BOOSTED.keys()
