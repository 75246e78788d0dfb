"""A run's version as a Hugging Face folder: the same arrays, and a model that starts from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import orjson
import pytest
import yaml
from safetensors.numpy import load_file

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.arrays import CheckpointContents
from services.trainer.models.initial_weights import leaves_of
from shared import packages
from shared.errors import ConfigError, WeightsError
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.run import checkpoint_files, checksums, trust
from shared.run.folder import RunFolder
from shared.run.state import initial_state
from tests.support import families, models
from tests.support.tokenizer import FOLDER as TOKENIZER
from volley_convert import export
from volley_proof.checkpoints.parameters import checksums_of

VERSION = "e000001-s000001"


def make_run(folder: Path, case: families.FamilyCase, dtype: type) -> dict[str, np.ndarray]:
    """A run's folder with versions of two steps; returns the parameters of the later one, by leaf."""
    model = models.write_hf(folder / "model", case.written, case.weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((TOKENIZER / name).read_bytes())
    run = folder / "run"
    checkpoints = CheckpointFolders(run / "checkpoints", "run", 3, OrbaxArrays())
    checkpoints.fence(1)
    params: dict[str, np.ndarray] = {}
    for step in (0, 1):
        exact = models.to_tunix(models.random_weights(case.config, step), case.config)
        params = {leaf: value.astype(dtype) for leaf, value in exact.items()}
        master = None if dtype is np.float32 else exact
        contents = CheckpointContents(params, {"count": np.zeros((), np.int32)}, master, case.config, None)
        checkpoints.save(
            replace(initial_state(0).starting_epoch(1, keep_reference=False), step=step, low=step), contents, None
        )
    config = {"run": {"name": "run", "dir": str(folder)}, "model": {"path": str(model)}, "data": {"env": "frozen_lake"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    trust.accept(RunFolder(run))
    return params


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-scaled", np.float32),
        ("qwen3-moe", np.float32),
        ("qwen2-tied", ml_dtypes.bfloat16),
        ("gemma2", np.float32),
    ],
)
def test_what_is_exported_is_loaded_as_the_same_arrays(name: str, dtype: type, tmp_path: Path) -> None:
    case = families.case(name)
    params = make_run(tmp_path, case, dtype)
    told = export.export(tmp_path / "run", tmp_path / "out", "latest")
    told.pop("warning", None)
    assert told == {"version": "e000001-s000001", "tensors": len(case.weights), "dtype": np.dtype(dtype).name}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == case.weights.keys()
    described = ModelConfig.read(tmp_path / "out")
    assert described == ModelConfig.parse(case.written)
    leaves = leaves_of(tmp_path / "out", described, 0)
    for leaf, value in params.items():
        assert np.asarray(leaves(leaf, value.shape)).tobytes() == value.tobytes()
    written = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert (written["torch_dtype"], written["bos_token_id"]) == (np.dtype(dtype).name, 1)
    assert ChatTokenizer(tmp_path / "out").eos_id == ChatTokenizer(TOKENIZER).eos_id


@pytest.mark.parametrize("part", ["params", "optimizer", "description"])
@pytest.mark.parametrize("is_of_a_run", [True, False])
def test_arrays_that_the_log_tells_otherwise_are_neither_exported_nor_started_from(
    tmp_path: Path, part: str, *, is_of_a_run: bool
) -> None:
    """Their digests, and the manifest's in checkpoints.jsonl, are those of the arrays."""
    make_run(tmp_path, families.case("llama-tied"), np.float32)
    run = RunFolder(tmp_path / "run")
    checkpoints = CheckpointFolders(run.checkpoints, "run", 3, OrbaxArrays())
    found = checkpoints.foreign(Origin("run", str(run.path), VERSION, checkpoint_files.digest(manifest_of(run))))
    manifest = checkpoint_files.read_manifest(found.folder)
    described = checksums.description(manifest.model, manifest.tree, manifest.adapter, manifest.probe)
    told = {**checksums_of(found.folder), "description": described}
    line = {"step": 1, "version": VERSION, "checksums": told}
    run.metrics.write_bytes(orjson.dumps(line) + b"\n")
    load(run, checkpoints, tmp_path / "before", is_of_a_run=is_of_a_run)
    run.metrics.write_bytes(orjson.dumps(line | {"checksums": told | {part: "0" * 32}}) + b"\n")
    with pytest.raises(
        ConfigError if is_of_a_run else WeightsError, match=r"checksum of its|manifest does not describe"
    ):
        load(run, checkpoints, tmp_path / "after", is_of_a_run=is_of_a_run)


def test_a_start_without_the_package_of_proofs_says_that_the_log_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path, families.case("llama-tied"), np.float32)
    run = RunFolder(tmp_path / "run")
    checkpoints = CheckpointFolders(run.checkpoints, "run", 3, OrbaxArrays())
    load(run, checkpoints, tmp_path / "out", is_of_a_run=True)
    assert not caplog.messages
    monkeypatch.setattr(packages, "found", lambda group: {})
    load(run, checkpoints, tmp_path / "out", is_of_a_run=True)
    assert caplog.messages == ["checkpoint not compared with its run's log"]


def load(run: RunFolder, checkpoints: CheckpointFolders, out: Path, *, is_of_a_run: bool) -> None:
    if is_of_a_run:
        checkpoints.foreign(Origin("run", str(run.path), VERSION, checkpoint_files.digest(manifest_of(run))))
    else:
        export.export(run.path, out, VERSION)


def manifest_of(run: RunFolder) -> Path:
    return run.checkpoints / VERSION / checkpoint_files.MANIFEST


def test_what_cannot_be_exported_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, families.case("llama-tied"), np.float32)
    run, out = tmp_path / "run", tmp_path / "out"
    export.export(run, tmp_path / "older", "e000001-s000000")
    for folder, version, named in (
        (run, "e000001-s000009", "not retained"),
        (run, "newest", "'newest' is no version"),
        (tmp_path / "model", "latest", "is not the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=named):
            export.export(folder, out, version)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export.export(run, tmp_path / "older", "latest")
    shutil.copytree(run, tmp_path / "second")
    assert export.main([str(tmp_path / "second"), str(tmp_path / "untrusted")]) == 2
    assert export.main([str(tmp_path / "second"), str(tmp_path / "trusted"), "--trust"]) == 0
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "e000001-s000001" / "optimizer")
    with pytest.raises(WeightsError, match="removed"):
        export.export(tmp_path / "second", out, "latest")
    damaged = max((run / "checkpoints" / "e000001-s000001" / "params").rglob("d/*"), key=lambda f: f.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="bytes, expected"):
        export.export(run, out, "latest")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
        export.export(run, out, "e000001-s000000")
    assert not out.exists()
    assert not list(tmp_path.glob(".volley-*"))
