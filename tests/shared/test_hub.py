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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("models/smolm2", "did you mean models/smollm2?"),
        ("smollm2", "`volley model get smollm2 models/smollm2` makes"),
        ("models/other", "give a Hugging Face folder"),
    ],
)
def test_a_missing_folder_names_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    (tmp_path / "models/smollm2").mkdir(parents=True)
    (tmp_path / "models/smollm2/config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        model_folder(path)
    assert (refused.value.hint or "").startswith(hint)
