"""Digests of data: what evaluations and the environment service recorded has to agree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.config import load
from shared.run import checkpoint_files, trust
from shared.run.data import combined, tree_digest
from shared.run.folder import RunFolder
from tests.support import small_run
from tests.support.small_run import RUN
from volley_proof.verify import command, data

FILES = {"train": "a" * 64, "eval": "b" * 64, "databases/x.sqlite": "c" * 64}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / RUN)


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(valid, tmp_path / RUN)
    folder = RunFolder(tmp_path / RUN)
    evaluated(folder, combined(FILES), combined(FILES))
    recorded(folder, FILES)
    return folder


def evaluated(folder: RunFolder, *digests: Any) -> None:
    rows = [{"step": step, "data": data} for step, data in enumerate(digests)]
    folder.evals.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def recorded(folder: RunFolder, parts: dict[str, str]) -> None:
    folder.environments.mkdir(exist_ok=True)
    whole = {"toy": {part: {"source": "/etc/passwd", "digest": digest} for part, digest in parts.items()}}
    folder.environment_data.write_bytes(orjson.dumps(whole))


def found(folder: RunFolder) -> list[str]:
    return [one["detail"] for one in command.verify(folder)["violations"]]


def test_the_same_digests_everywhere_are_proven(run: RunFolder):
    assert found(run) == []
    evaluated(run, None, combined(FILES))  # a run that began before there were digests
    assert found(run) == []
    run.environment_data.unlink()
    assert found(run) == []


def test_an_evaluation_of_other_data_is_named(run: RunFolder):
    evaluated(run, combined(FILES), combined(FILES | {"eval": "d" * 64}))
    told = "the evaluation of toy used other data than those before: eval has the digest dddddddddddddddd, it was bbbb"
    assert any(told in one for one in found(run))


@pytest.mark.parametrize("part", FILES)
def test_another_record_of_the_environment_service_is_named(run: RunFolder, part: str):
    recorded(run, FILES | {part: "d" * 64})
    (told,) = found(run)
    assert f"toy was evaluated with different data: {part.partition('/')[0]} has the digest" in told


def test_a_data_file_that_has_changed_is_told_of_ones_own_run_alone(run: RunFolder, tmp_path: Path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"{}")
    section = load([run.config], []).config.data.model_copy(update={"train": file})
    recorded(run, {"train": checkpoint_files.digest(file)})
    trust.accept(run)
    assert data.changed(run, section) == []
    file.write_bytes(b"[]")
    (told,) = data.changed(run, section)
    assert told.startswith(f"{file}: train has the digest")
    file.unlink()
    assert data.changed(run, section) == []
    file.write_bytes(b"[]")
    strange = RunFolder(shutil.copytree(run.path, tmp_path / "strange" / RUN))
    strange.config.write_bytes(strange.config.read_bytes() + b"# of somebody else\n")
    assert data.changed(strange, section) == []


@pytest.fixture
def submitted(run: RunFolder) -> Path:
    """Code of a submitted environment, as an evaluation and the environment service's record name it."""
    source = run.environments / "made" / "2" / "source"
    (source / "inner").mkdir(parents=True)
    (source / "made.py").write_bytes(b"reward = 1\n")
    (source / "inner" / "other.py").write_bytes(b"")
    row = {"step": 1, "env": "made@2", "data": {"source": tree_digest(source)}}
    run.evals.write_bytes(run.evals.read_bytes() + orjson.dumps(row) + b"\n")
    return source


@pytest.mark.parametrize(
    "change",
    [
        lambda source: (source / "made.py").write_bytes(b"reward = 2\n"),
        lambda source: (source / "made.py").rename(source / "renamed.py"),
        lambda source: (source / "inner" / "more.py").write_bytes(b""),
        lambda source: shutil.rmtree(source),
        lambda source: (source / "inner" / "link").symlink_to("/etc/passwd"),
        lambda source: os.mkfifo(source / "pipe"),
        lambda source: (shutil.rmtree(source), source.symlink_to("/etc")),
    ],
)
def test_other_code_of_a_submitted_environment_is_named(run: RunFolder, submitted: Path, change: Callable[[Path], Any]):
    assert found(run) == []
    change(submitted)
    (violation,) = command.verify(run)["violations"]
    assert violation["file"] == "environments/made/2/source"


def test_code_that_lies_elsewhere_is_not_missed(run: RunFolder, submitted: Path):
    shutil.rmtree(submitted.parent)
    assert found(run) == []


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"toy": 1}', b'{"toy": {"train": {}}}', b"[" * 10_000])
def test_a_record_that_is_none_is_named(run: RunFolder, text: bytes):
    run.environment_data.write_bytes(text)
    (told,) = found(run)
    assert "it cannot be read" in told
