"""Folders of models and names on the hub, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.models.hub import model_folder


def test_a_path_below_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path models/missing is no folder") as error:
        model_folder("models/missing")
    assert "download" not in str(error.value)


def test_a_gguf_file_is_converted_first(tmp_path: Path) -> None:
    (file := tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file, not a folder") as refused:
        model_folder(str(file))
    assert f"volley model get {file} models/tiny" in refused.value.hint
