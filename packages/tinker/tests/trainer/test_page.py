"""The page of Tinker's interface names every route, and those that are refused."""

import re

from tests.docs.commands import ROOT
from volley_tinker.server import records, routes

PAGE = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Routes")[2].partition("## ")[0]


def test_the_page_names_every_route():
    named = set(re.findall("`([^`]+)`", SECTION))
    ids = re.compile(r"\{\w+\}")
    paths = {key.partition("/api/v1/")[2] for key in routes.ROLES | records.ROLES}
    short = {ids.sub("ID", path) for path in paths}
    ends = {path.rpartition("/")[2] for path in short}
    missing = {path for path in short if not ({path, path.rpartition("/")[2]} & named)}
    assert missing == {"external_weights/ID/ID/ID/ID", "training_runs/ID/checkpoints/ID/ID"}
    assert {"publish", "ttl"} <= ends


def test_the_page_names_what_is_refused():
    (line,) = [line for line in SECTION.splitlines() if "refused, with the reason" in line]
    assert set(re.findall("`([^`]+)`", line)) == set(routes.REFUSED)
