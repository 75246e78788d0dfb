"""Tokenizers of exported folders, as the engine's transformers reads them: version 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import families
from tests.support.tokenizer import FOLDER
from volley_convert import exported_files


@pytest.mark.parametrize("name", families.NAMES)
def test_an_exported_tokenizer_is_read_alike(name: str, tmp_path: Path) -> None:
    assert exported_files.copy_tokenizer(FOLDER, tmp_path)
    written = json.loads((families.FOLDER / name / "config.json").read_text(encoding="utf-8"))
    tokens = exported_files.token_ids(tmp_path, (2, 5), {"bos_token_id": 1})
    assert tokens == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 5]}
    exported_files.write_json(tmp_path / "config.json", written | tokens)
    exported_files.write_json(tmp_path / "generation_config.json", tokens)
    assert exported_files.difference(tmp_path) is None
