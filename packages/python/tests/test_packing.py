"""data.env as a file or an import path: a name takes its place, which tells changes apart."""

from __future__ import annotations

import hashlib
import io
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared import config
from shared.errors import ConfigError
from shared.run import pinned
from shared.run.sources import FoundSource, find, is_source
from volley_python.submissions.packing import content_of

SOURCE = "class Mine:\n    pass\n"


def loaded(folder: Path, data: dict[str, Any], *overrides: str) -> config.LoadedConfig:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "none"}, "data": data}), encoding="utf-8")
    return config.load([file], overrides)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory: with a file, and a package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.env.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "mine_of_tests" / "inner").mkdir(parents=True)
    (tmp_path / "mine_of_tests" / "__init__.py").write_text(
        "raise RuntimeError('nobody may import me')\n", encoding="utf-8"
    )
    (tmp_path / "mine_of_tests" / "inner" / "envs.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("env", ["./project", "project/", "./project:game:Game"])
def test_a_folder_is_packed_as_it_would_be_submitted(here: Path, env: str) -> None:
    (here / "project").mkdir()
    (here / "project/game.py").write_text("class Game: ...\n", encoding="utf-8")
    (here / "project/rows.jsonl").write_text("{}\n", encoding="utf-8")
    data = loaded(here, {"env": env}).config.data
    source = data.sources[data.env]
    assert source.entry == ("game:Game" if ":" in env else None)
    content, archive = content_of(FoundSource(source.path, source.entry))
    assert archive
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == ["game.py", "rows.jsonl"]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("./a.py", True),
        ("a.py", True),
        ("/x/a.whl:package.module:Class", True),
        ("package.module:Class", True),
        ("folder/of/mine", True),
        ("frozen_lake", False),
        ("adder@1", False),
        ("a.b", False),
    ],
)
def test_files_and_import_paths_are_told_from_names(env: str, told: bool) -> None:
    assert is_source(env) is told


def test_a_name_takes_the_place_of_a_file(here: Path) -> None:
    found = loaded(here, {"env": "./my.env.py"}).config.data
    source = found.sources[found.env]
    assert found.env.startswith("my_env-")
    assert found.env.endswith("@1")
    assert (source.path, source.entry) == (here / "my.env.py", None)
    assert source.sha256 == hashlib.sha256(SOURCE.encode()).hexdigest()
    again = loaded(here, {"env": "frozen_lake"}, "data.env=my.env.py:Mine").config.data
    assert again.sources[again.env].entry == "Mine"


def test_a_file_that_is_too_large_is_not_read(here: Path) -> None:
    with (here / "large.py").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ConfigError, match="has 8589934592 bytes"):
        loaded(here, {"env": "./large.py"})


def test_a_resolved_configuration_is_read_without_the_file(here: Path) -> None:
    first = loaded(here, {"env": "./my.env.py"})
    (here / "my.env.py").unlink()
    (here / "again.yaml").write_text(first.to_yaml(), encoding="utf-8")
    assert config.load([here / "again.yaml"]).config == first.config


def test_another_content_class_or_setting_is_another_environment(here: Path) -> None:
    names = {loaded(here, {"env": "./my.env.py"}).config.data.env}
    names.add(loaded(here, {"env": "./my.env.py:Mine"}).config.data.env)
    names.add(loaded(here, {"env": "./my.env.py", "env_config": {"size": 3}}).config.data.env)
    (here / "my.env.py").write_text(SOURCE + "#", encoding="utf-8")
    names.add(loaded(here, {"env": "./my.env.py"}).config.data.env)
    assert len(names) == 4


def test_a_run_refuses_a_changed_file_and_takes_one_that_was_moved(here: Path) -> None:
    was = pinned.relevant(loaded(here, {"env": "./my.env.py"}).config)
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "my.env.py").write_text(SOURCE, encoding="utf-8")
    moved = pinned.relevant(loaded(here, {"env": "elsewhere/my.env.py"}).config)
    assert pinned.permitted(was, moved, step=1) == []
    (here / "my.env.py").write_text(SOURCE + "#", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.env .* may not change"):
        pinned.permitted(was, pinned.relevant(loaded(here, {"env": "./my.env.py"}).config), step=1)


def test_a_mixture_names_files_too(here: Path) -> None:
    data = {"env": "frozen_lake", "mixture": {"./my.env.py": {"weight": 2, "env_config": {"a": 1}}, "sokoban": 1}}
    found = loaded(here, data).config.data
    (name,) = found.sources
    assert list(found.environments) == ["frozen_lake", name, "sokoban"]
    assert (found.environments[name].weight, found.environments[name].env_config) == (2, {"a": 1})


def test_a_file_is_packed_with_what_it_imports_from_its_folder(here: Path) -> None:
    (here / "my.env.py").write_text("import helpers\nimport json\n" + SOURCE, encoding="utf-8")
    (here / "helpers.py").write_text("from mine_of_tests.inner import envs\n", encoding="utf-8")
    (here / "unused.py").touch()
    first = loaded(here, {"env": "./my.env.py"}).config.data
    source = first.sources[first.env]
    content, archive = content_of(FoundSource(source.path, source.entry))
    assert (archive, hashlib.sha256(content).hexdigest()) == (True, source.sha256)
    names = ["helpers.py", "mine_of_tests/__init__.py", "mine_of_tests/inner/envs.py", "my_env.py", "pyproject.toml"]
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == names
    (here / "helpers.py").write_text("import mine_of_tests\n", encoding="utf-8")
    assert loaded(here, {"env": "./my.env.py"}).config.data.env != first.env


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nfrom ..above import x", r"my.env.py, line 2: the import `from \.\.above` leads out of"),
        ("import linked", r"linked.py is a link that leads out of the folder"),
        ("try:\n    from .helpers import x\nexcept ImportError:\n    pass\n", ""),
    ],
)
def test_an_import_that_leads_out_of_the_folder_is_refused(here: Path, text: str, message: str) -> None:
    (here / "linked.py").symlink_to(Path(__file__))
    (here / "my.env.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        content_of(find("./my.env.py", here))


def test_a_package_is_packed_always_the_same_and_not_imported(here: Path) -> None:
    (here / "pyproject.toml").write_text('[project]\nname = "mine"\ndependencies = ["numpy>=2"]\n', encoding="utf-8")
    found = loaded(here, {"env": "mine_of_tests.inner.envs:Mine"}).config.data
    source = found.sources[found.env]
    assert (found.env.partition("-")[0], source.path) == ("Mine", here / "mine_of_tests")
    content, archive = content_of(FoundSource(source.path, source.entry))
    (here / "mine_of_tests" / "__pycache__").mkdir()
    (here / "mine_of_tests" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert (content_of(FoundSource(source.path, source.entry)), archive) == ((content, True), True)
    names = ["mine_of_tests/__init__.py", "mine_of_tests/inner/envs.py", "pyproject.toml"]
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == names


def test_an_installed_package_brings_what_it_declares_to_need(tmp_path: Path) -> None:
    """Starlette stands for any package beside this program."""
    content, _ = content_of(find("starlette.routing:Router", tmp_path))
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert "starlette/routing.py" in archive.namelist()
    assert b"Requires-Dist: anyio" in archive.read("starlette-0.dist-info/METADATA")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("./none.py", "does not exist or is not a file"),
        ("nothing_like_it.envs:Mine", "there is no package 'nothing_like_it'"),
        ("os:system", "there is no package 'os'"),
        ("sys:exit", "there is no package 'sys'"),
        ("folder/of/mine", "neither an environment's name nor"),
    ],
)
def test_what_is_not_there_is_told(here: Path, env: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loaded(here, {"env": env})
