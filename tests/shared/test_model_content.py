"""Digests of a model folder's files: a change of any is refused, wherever the folder lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from services.orchestrator import app as orchestrator
from services.orchestrator import settings as orchestrator_settings
from services.rollout import settings as rollout
from shared.config import load
from shared.errors import ConfigError
from shared.models import content
from shared.schema import RunConfig

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/rag.jinja",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name, encoding="utf-8")
    return folder


def config(model: Path | str) -> RunConfig:
    redis = "services.redis_url=redis://127.0.0.1:1"
    return load(["configs/quickstart.yaml"], [f"model.path={model}", redis]).config


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["changed", "removed", "added"])
def test_a_changed_file_is_refused_with_both_digests(model: Path, name: str, how: str) -> None:
    if how == "added":
        (model / name).rename(model / "kept")
    began = content.digests(model)
    if how == "removed":
        (model / name).unlink()
    else:
        (model / name).write_text(f"{name} ", encoding="utf-8")
    now = content.digests(model)
    (key,) = (key for key in now if now[key] != began[key])
    with pytest.raises(ConfigError) as refused:
        content.check(began, now, model)
    told = str(refused.value)
    assert Path(name).parent.name in told
    assert Path(name).name.replace("rag", "*") in told
    assert began[key] in told
    assert now[key] in told
    assert refused.value.hint


def test_another_name_of_an_additional_template_is_refused(model: Path) -> None:
    began = content.digests(model)
    folder = model / "additional_chat_templates"
    (folder / "rag.jinja").rename(folder / "tool_use.jinja")
    with pytest.raises(ConfigError, match="additional_chat_templates"):
        content.check(began, content.digests(model), model)


def test_another_folder_with_the_same_files_is_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("other", encoding="utf-8")
    began = content.with_content(config(model), model)
    assert content.with_content(began, tmp_path / "copy") == began


def test_a_file_that_an_older_run_did_not_record_is_not_compared(model: Path) -> None:
    content.check({}, content.digests(model), model)


def test_what_is_no_file_is_refused(model: Path) -> None:
    (model / "added_tokens.json").unlink()
    os.mkfifo(model / "added_tokens.json")
    with pytest.raises(ConfigError, match=r"added_tokens\.json cannot be read: is a FIFO"):
        content.digests(model)


async def test_a_service_refuses_files_that_have_changed_since_the_run_began(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree("configs/models/tiny", model)
    began = content.with_content(config(model), model)
    rollout.from_config(began)
    (model / "chat_template.jinja").write_text("another", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        rollout.from_config(began)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        async with orchestrator.open_orchestrator(orchestrator_settings.from_config(began)):
            pass
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        content.with_content(began, model)
