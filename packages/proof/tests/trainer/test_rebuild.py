"""A policy that is made again of a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.config import load
from shared.errors import ConfigError
from shared.models import content
from volley.layout import PROJECT
from volley_proof.replay.rebuild import RebuiltPolicy

MODEL = PROJECT / "configs" / "models" / "tiny"


def test_a_model_folder_that_has_changed_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model, missing = tmp_path / "model", tmp_path / "checkpoints/e000001-s000001"
    shutil.copytree(MODEL, model)
    run = load(["configs/quickstart.yaml"], [f"model.path={model}"]).config
    run = content.with_content(run, model)
    (model / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        RebuiltPolicy(run, missing, missing.parent)
