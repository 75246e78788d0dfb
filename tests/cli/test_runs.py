"""A run's folder: made once, continued by the same configuration, used by one process at a time."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest

from services.cli import runs
from services.cli.layout import RunFolder
from services.cli.train import fresh_name
from shared.config import Loaded, validate
from shared.errors import ConfigError


def loaded(folder: Path, **sections: Any) -> Loaded:
    return validate({"run": {"name": "r", "dir": str(folder)}, "model": {"path": "m"}, "data": {"env": "e"}, **sections})


def claim(wanted: Loaded) -> None:
    with runs.claimed(wanted):
        pass


def test_a_new_run_records_what_it_is(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record):
        assert (record.seed, record.finished) == (0, False)
        assert {"volley", "python", "jax", "sglang-jax"} <= record.versions.keys()
    assert "env: e" in folder.config.read_text()
    assert runs.read_record(folder) == record


def test_it_is_continued_by_the_same_configuration_wherever_its_services_listen(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record):
        runs.write_record(folder, dataclasses.replace(record, elapsed_s=12.0))
    with runs.claimed(loaded(tmp_path, services={"env": {"port": 9}}, trainer={"max_steps": 10})) as (_, again):
        assert again.elapsed_s == 12.0


def test_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    claim(loaded(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.max_steps \(was 10, now 11\).*run\.name"):
        claim(loaded(tmp_path, trainer={"max_steps": 11}))


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record):
        runs.write_record(folder, dataclasses.replace(record, finished=True))
    with pytest.raises(ConfigError, match="is finished"), runs.claimed(loaded(tmp_path)):
        pass


def test_two_processes_cannot_train_one_run(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)), pytest.raises(ConfigError, match="is being trained by process"):
        claim(loaded(tmp_path))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no readable run\.json"), runs.claimed(loaded(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run folder .*choose another with run\.dir"), runs.claimed(loaded(tmp_path / "file")):
        pass


def test_the_quickstart_takes_a_new_name_after_a_finished_run(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(loaded(tmp_path).to_yaml())
    assert fresh_name([str(config)], []) == ["run.name=r"]
    with runs.claimed(loaded(tmp_path)) as (folder, record):
        runs.write_record(folder, dataclasses.replace(record, finished=True))
    assert fresh_name([str(config)], ["run.seed=1"]) == ["run.seed=1", "run.name=r-2"]
    assert fresh_name([str(config)], ["run.name=mine"]) == ["run.name=mine"]


def test_secrets_are_private_and_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.secrets.mkdir()
    path = runs.secret(folder, "token")
    word = path.read_text()
    assert len(word) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert runs.secret(folder, "token").read_text() == word
