"""Folders whose names are not UTF-8: named before anything is started or written, and read like others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.config import changed, load, rooted
from shared.errors import ConfigError
from tests.support import small_run
from volley.__main__ import main
from volley.layout import PROJECT

NAME = os.fsdecode(b"w\xffd")
CONFIG = str(PROJECT / "configs/quickstart.yaml")
MODEL = f"model.path={PROJECT}/configs/models/tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory."""
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path / NAME)
    return tmp_path / NAME


@pytest.mark.parametrize("more", [[], ["run.dir={}/runs"]], ids=["relative", "absolute"])
def test_a_run_is_not_started_there(
    folder: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train",
                "--config",
                CONFIG,
                MODEL,
                "model.initial_weights=random",
                *(one.format(tmp_path) for one in more),
            ]
        )
    assert ended.value.code == 2
    assert "is not UTF-8" in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("key", ["run.dir", "run.name", "model.path", "data.train"])
def test_a_value_that_is_not_utf_8_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.* is not UTF-8"):
        load([CONFIG], [f"{key}=/tmp/{NAME}"])
    with pytest.raises(ConfigError, match=rf"{key} .* is not UTF-8"):
        changed(load([CONFIG]), {key: f"/tmp/{NAME}"})


def test_paths_below_such_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir .* is not UTF-8"):
        rooted(load([CONFIG], [MODEL]), tmp_path / NAME)


@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_run_that_lies_there_is_read(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NAME).mkdir()
    small_run.make(tmp_path / small_run.RUN).rename(tmp_path / NAME / NAME)
    monkeypatch.chdir(tmp_path / NAME)
    with pytest.raises(SystemExit) as ended:
        main([command, NAME])
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
