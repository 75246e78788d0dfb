"""`volley tinker`: what is checked and written before the services start."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import yaml

from shared.errors import ConfigError
from shared.files import locks
from shared.run.folder import RunFolder
from tests.support import models
from volley_tinker import futures
from volley_tinker.command import TinkerOptions, prepare, ready_lines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = models.write_hf(tmp_path / "small", models.tiny_config(max_position_embeddings=256))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_key_and_the_folder_are_kept(model: Path, tmp_path: Path):
    folder = tmp_path / "server"
    first = prepare(str(model), TinkerOptions(folder=folder))
    again = prepare(str(model), TinkerOptions(folder=folder, name="other", context_length=64))
    assert first.key == again.key
    assert first.key.startswith("tml-")
    assert (first.name, again.name) == ("small", "other")
    tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert tree["rollout"]["engine"]["context_length"] == 64
    assert tree["tinker"]["model_name"] == "other"
    assert first.loaded.config.rollout.engine.context_length == 256
    token = RunFolder(folder).secrets / "token_service"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert f"export TINKER_API_KEY={first.key}" in ready_lines(first, 1.0)
    assert prepare(str(model), TinkerOptions(folder=folder, api_key="tml-" + "k" * 20)).key == "tml-" + "k" * 20


@pytest.mark.parametrize("key", ["tml-short", "k" * 40, "tml-with a blank and more", "tml-" + "ü" * 30])
def test_a_key_that_the_sdk_would_refuse_is_refused(model: Path, tmp_path: Path, key: str):
    with pytest.raises(ConfigError):
        prepare(str(model), TinkerOptions(folder=tmp_path / "server", api_key=key))


def test_a_folder_in_use_and_a_model_without_weights_are_refused(model: Path, tmp_path: Path):
    folder = tmp_path / "server"
    folder.mkdir()
    lock = locks.lock_file(folder / futures.LOCK)
    assert locks.try_lock(lock)
    with pytest.raises(ConfigError):
        prepare(str(model), TinkerOptions(folder=folder))
    os.close(lock)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        prepare(str(model), TinkerOptions(folder=folder))
    assert json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3"
