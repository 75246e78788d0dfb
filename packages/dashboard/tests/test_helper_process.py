"""Helper processes of the dashboard and of trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from volley_dashboard import helper_process


def test_packages_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("volley", "shared"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    with helper_process.start(["--version"], log) as process:
        assert process.wait(60) == 0
    assert log.read_text(encoding="utf-8").startswith("volley ")
