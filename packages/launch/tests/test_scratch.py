"""Temporary folders of a command's own run: nothing stays but the logs that an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError, VolleyError
from shared.run.folder import RunFolder
from volley_launch.scratch import scratch_folder


def fill(folder: Path, log: str) -> RunFolder:
    run = RunFolder(folder / "run")
    for path in (run.logs, run.secrets, run.checkpoints / "v1"):
        path.mkdir(parents=True)
        (path / "file").write_text("x" if path != run.logs else log, encoding="utf-8")
    run.config.write_text("a: 1", encoding="utf-8")
    return run


def failing(tmp_path: Path, log: str, error: Exception) -> None:
    with scratch_folder(".a-", tmp_path) as folder:
        fill(folder, log)
        raise error


def test_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(tmp_path, "said", ZeroDivisionError())
    with pytest.raises(ConfigError):
        failing(tmp_path, "", ConfigError("nothing was started"))
    with scratch_folder(".a-", tmp_path) as folder:
        fill(folder, "said")
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_a_failed_run_stay(tmp_path: Path) -> None:
    with pytest.raises(VolleyError):
        failing(tmp_path, "said", VolleyError("rollout ended"))
    (folder,) = tmp_path.iterdir()
    assert [path for path in folder.rglob("*") if path.is_file()] == [RunFolder(folder / "run").logs / "file"]
