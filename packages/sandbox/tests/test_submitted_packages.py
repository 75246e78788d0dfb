"""Submissions with dependencies, and as archives: over HTTP, with a package index of the test's own."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from packages.sandbox.tests.sandbox.packages import package_index, wheel
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import ADDER, decided, play, submit

NEEDS = '# /// script\n# dependencies = ["{0}"]\n# ///\n'
CALLS = "from games.zero import ZERO\n" + ADDER.replace("self.a + self.b", "self.a + self.b + ZERO")
ZIP = {"Content-Type": "application/zip"}


def zipped(files: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The address of a package index that has `carry` 1.0, which adds."""
    package = wheel("carry", "1.0", {"carry.py": "def add(a, b):\n    return a + b\n"})
    with package_index(tmp_path / "index", {"carry-1.0-py3-none-any.whl": package}) as url:
        yield url


async def test_dependencies_are_installed_and_found_again_without_the_index(
    open_client: OpenClient, index: str
) -> None:
    source = NEEDS.format("carry>=1") + ADDER.replace("self.a + self.b", "carry.add(self.a, self.b)").replace(
        "import random", "import carry, random"
    )
    async with open_client(package_index=index) as client:
        await submit(client, source, name="adder")
        row = await decided(client, "adder")
        assert row["state"] == "active", row
    async with open_client(package_index=index) as client:
        assert (await play(client, "adder", "1", "no")).json()["reward"] == 0.0


async def test_what_cannot_be_installed_is_rejected_with_the_reason(open_client: OpenClient, index: str) -> None:
    async with open_client(package_index=index) as client:
        await submit(client, NEEDS.format("nothing-like-it") + ADDER, name="adder")
        row = await decided(client, "adder")
        assert (row["state"], "nothing-like-it cannot be installed" in row["why"]) == ("rejected", True), row
        for wrong in ("carry @ http://127.0.0.1/x.whl", "--index-url=http://x", "../carry"):
            answer = await submit(client, NEEDS.format(wrong) + ADDER, name="other")
            assert answer.status_code == 422, answer.text


async def test_an_archive_is_unpacked_and_played(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        data = zipped({"games/__init__.py": "", "games/adder.py": CALLS, "games/zero.py": "ZERO = 0"})
        query = {"name": "adder", "entry": "games.adder:Adder"}
        answer = await client.post("/environments", params=query, content=data, headers=ZIP)
        assert answer.status_code == 202, answer.text
        assert (await decided(client, "adder"))["state"] == "active"
    async with open_client(limits=Limits()) as client:
        assert (await play(client, "adder", "1", "no")).status_code == 200


async def test_archives_that_are_none_or_reach_outside_are_refused(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        for content in (b"no zip", zipped({"../outside.py": "x = 1"}), b""):
            answer = await client.post("/environments?name=a", content=content, headers=ZIP)
            assert 400 <= answer.status_code < 500, answer.text
