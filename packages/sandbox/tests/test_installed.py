"""Environments of packages that are installed beside the service: chosen by a request, packed, and sandboxed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import ADDER, decided, play
from volley_sandbox.submissions.installed import installed

_IMPORTED = "raise RuntimeError('the service may not import me')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that names an environment as an entry point, where this Python finds it."""
    site = tmp_path / "site"
    (site / "sums_of_tests").mkdir(parents=True)
    (site / "sums_of_tests" / "__init__.py").write_text(
        "import sys\nif 'pytest' in sys.modules:\n    " + _IMPORTED, encoding="utf-8"
    )
    (site / "sums_of_tests" / "envs.py").write_text(ADDER, encoding="utf-8")
    info = site / "sums_of_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sums-of-tests\nVersion: 1.0\n", encoding="utf-8")
    (info / "top_level.txt").write_text("sums_of_tests\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[volley.environments]\nsums = sums_of_tests.envs:Adder\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    installed.cache_clear()
    yield site
    installed.cache_clear()


async def test_an_entry_point_is_listed_submitted_and_played(open_client: OpenClient, package: Path) -> None:
    async with open_client(limits=Limits()) as client:
        rows = (await client.get("/environments")).json()["installed"]
        assert rows == [{"name": "sums", "import_path": "sums_of_tests.envs:Adder", "package": "sums-of-tests 1.0"}]
        body = {"name": "adder", "import_path": "sums_of_tests.envs:Adder"}
        assert (await client.post("/environments", json=body)).status_code == 202
        row = await decided(client, "adder")
        assert (row["state"], row["entry"]) == ("active", "sums_of_tests.envs:Adder"), row
        assert (await play(client, "adder", "1", "no")).json()["reward"] == 0.0


@pytest.mark.parametrize("path", ["os:system", "subprocess:Popen", "services.env.app:open_env", "x", "/etc/passwd"])
async def test_nothing_else_can_be_imported(open_client: OpenClient, package: Path, path: str) -> None:
    async with open_client() as client:
        answer = await client.post("/environments", json={"name": "a", "import_path": path})
        assert (answer.status_code, "is not an environment of a package" in answer.json()["detail"]) == (404, True)
        assert "sums_of_tests.envs:Adder" in answer.json()["hint"]
