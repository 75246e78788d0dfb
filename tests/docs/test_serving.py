"""The page of routes and fields says what the code does."""

import json
import re

import pytest

from tests.docs.commands import ROOT
from volley_serving.dialects.dialect import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from volley_serving.dialects.fields import IGNORED, MESSAGES_NEUTRAL, NEUTRAL, RESPONSES_NEUTRAL

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def after(text):
    """Rows of the first table after a text, without its head: (cells of the first column, of the second)."""
    lines = PAGE[PAGE.index(text) :].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells = line.split("|")
        rows.append((re.findall("`([^`]+)`", cells[1]), re.findall("`([^`]+)`", cells[2])))
    return rows


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("Chat completions, `POST", CHAT),
        ("Text completions, `POST", COMPLETIONS),
        ("Responses, `POST", RESPONSES),
        ("Messages, `POST", MESSAGES),
    ],
)
def test_the_page_names_every_honoured_field(text, dialect):
    assert sorted(name for names, _ in after(text) for name in names) == sorted(dialect.body.model_fields)


def test_the_page_names_every_ignored_field():
    section = PAGE.partition("## Ignored fields")[2].partition("## ")[0]
    assert set(re.findall("`([^`]+)`", section)) == IGNORED


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("## Fields that may only", NEUTRAL),
        ("Only on `/v1/responses`", {k: v for k, v in RESPONSES_NEUTRAL.items() if NEUTRAL.get(k) != v}),
        ("Only on `/v1/messages`", {k: v for k, v in MESSAGES_NEUTRAL.items() if NEUTRAL.get(k) != v}),
    ],
)
def test_the_page_has_the_values_that_ask_for_nothing(text, table):
    listed = {name: [*map(json.loads, values)] for values, names in after(text) for name in names}
    assert listed == {name: sorted(values, key=json.dumps) for name, values in table.items()}
