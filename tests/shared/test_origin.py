"""`model.path: RUN@VERSION`: found, kept, and what cannot be started from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import yaml

from services.trainer.checkpoints.store import CheckpointFolders
from shared.config import rooted, validate
from shared.errors import ConfigError, WeightsError
from shared.models import content, hub, origin
from shared.run import state as states
from shared.run import trust
from shared.run.checkpoint_files import MANIFEST, read_manifest
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from tools.simulated.trainer import NumpyArrays, SimulatedBackend

MODEL = {"vocab_size": 96, "model_type": "qwen3"}


def backend(folder: Path, found: origin.Origin | None = None, run: str = "a") -> SimulatedBackend:
    checkpoints = CheckpointFolders(folder / "checkpoints", run, 3, NumpyArrays())
    checkpoints.fence(1)
    return SimulatedBackend(checkpoints, MODEL, 0, found)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The run a with versions of two steps, started from tmp_path with a relative path."""
    shutil.copytree(Path(__file__).parents[2] / "configs/models/tiny", tmp_path / "models/tiny")
    folder = tmp_path / "runs/a"
    made = backend(folder)
    assert made.restore() is None
    made.build()
    state = states.initial_state(0).starting_epoch(1, keep_reference=False)
    made.start(state)
    made.save(replace(state, step=1, low=2), state.version)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "a"}, "model": {"path": "models/tiny"}, "data": {"env": "e"}}), encoding="utf-8"
    )
    (folder / "run.json").write_bytes(orjson.dumps({"cwd": str(tmp_path)}))
    trust.accept(RunFolder(folder))
    return folder


def run(tmp_path: Path, path: str) -> RunConfig:
    tree = {"run": {"name": "b", "dir": str(tmp_path / "runs")}, "model": {"path": path}, "data": {"env": "e"}}
    return rooted(validate(tree), tmp_path).config


@pytest.mark.parametrize("version", ["e000001-s000001", "latest"])
def test_a_version_is_found_and_its_model_kept(tmp_path: Path, source: Path, version: str):
    found = hub.keep(run(tmp_path, f"runs/a@{version}"))
    assert found is not None
    assert (found.run, found.path) == ("a", f"{source}@e000001-s000001")
    folder = hub.model_folder(found.path, tmp_path / "runs/b")
    assert folder == tmp_path / "runs/b/model"
    assert orjson.loads((folder / "config.json").read_bytes()) == MODEL, "of the weights, not of what lies there now"
    assert (folder / "tokenizer.json").exists()


def test_latest_is_resolved_once(tmp_path: Path, source: Path):
    first = hub.keep(run(tmp_path, "runs/a@latest"))
    made = backend(source)
    state = made.restore()
    assert state is not None
    made.build()
    made.save(replace(state, step=2), state.version)
    assert hub.keep(run(tmp_path, "runs/a@latest")) == first


def test_the_weights_are_those_of_the_version_and_the_source_may_go(tmp_path: Path, source: Path):
    config = run(tmp_path, "runs/a@latest")
    found = hub.keep(config)
    assert found is not None
    of_a, of_b = backend(source), backend(tmp_path / "runs/b", found, "b")
    of_a.restore()
    of_a.build()
    of_b.restore()
    of_b.build()
    assert all((of_a.params[name] == of_b.params[name]).all() for name in of_a.params)
    of_b.start(states.initial_state(0).starting_epoch(1, keep_reference=False))
    shutil.rmtree(source)
    again = backend(tmp_path / "runs/b", hub.keep(config), "b")
    assert again.restore() is not None
    again.build()
    assert hub.model_folder(config.model.path, config.run.folder).name == "model"


def test_a_name_that_trained_nothing_may_start_from_something_else(tmp_path: Path, source: Path):
    hub.keep(run(tmp_path, "runs/a@e000001-s000000"))
    found = hub.keep(run(tmp_path, "runs/a@e000001-s000001"))
    assert origin.read(tmp_path / "runs/b/model") == found


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/none@latest", "does not exist"),
        ("runs@latest", "has no checkpoint"),
        ("runs/a@e000001-s000009", r"not retained in .*retained are e000001-s000000, e000001-s000001"),
        ("runs/a@newest", "'newest' is no version"),
    ],
)
def test_what_cannot_be_started_from_says_why(tmp_path: Path, source: Path, path: str, said: str):
    with pytest.raises(ConfigError, match=said):
        hub.keep(run(tmp_path, path))
    assert not (tmp_path / "runs/b").exists()


@pytest.mark.parametrize("damage", ["flipped", "replaced", "gone"])
def test_a_version_that_is_not_what_it_was_is_refused(tmp_path: Path, source: Path, damage: str):
    found = hub.keep(run(tmp_path, "runs/a@latest"))
    assert found is not None
    match damage:
        case "flipped":
            file = next((found.checkpoint / "params").iterdir())
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        case "replaced":
            manifest = orjson.loads((found.checkpoint / MANIFEST).read_bytes())
            (found.checkpoint / MANIFEST).write_bytes(orjson.dumps(manifest | {"created": 1.0}))
        case _:
            shutil.rmtree(found.checkpoint)
    made = backend(tmp_path / "runs/b", found, "b")
    made.restore()
    with pytest.raises(ConfigError, match=r"e000001-s000001 cannot be used: .*retained are"):
        made.build()


def test_the_model_of_a_run_that_cannot_be_found_is_named(tmp_path: Path, source: Path):
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(ConfigError, match="the model of run a cannot be used"):
        hub.keep(run(tmp_path, "runs/a@latest"))


@pytest.mark.parametrize("own", [True, False])
def test_a_model_that_has_changed_since_its_run_was_begun_is_refused(tmp_path: Path, source: Path, own: bool):
    """`eval RUN`, `export` and a run that starts from it would read other texts than it was trained on."""
    model = tmp_path / "models/tiny"
    tree = yaml.safe_load((source / "config.yaml").read_text(encoding="utf-8"))
    tree["model"]["content"] = content.digests(model)
    if not own:
        shutil.move(model, source / "model")
        model = source / "model"
        trust._accepted.clear()
    (source / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = origin.find(f"{source}@latest", None)
    assert found is not None
    assert hub.model_of(found) == model
    (model / "tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes() + b" ")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json .* changed"):
        hub.model_of(found)


def test_provenance_is_in_the_state(tmp_path: Path, source: Path):
    found = {"run": "a", "folder": str(source), "version": "e000001-s000001", "manifest": "x"}
    state = states.initial_state(0).starting_epoch(1, keep_reference=False, origin=found)
    assert state.starting_epoch(2, keep_reference=False).origin == found
    assert states.TrainerState.from_mapping(orjson.loads(state.to_json())).origin == found
    with pytest.raises(WeightsError):
        states.TrainerState.from_mapping(orjson.loads(state.to_json()) | {"origin": {"run": 1}})
    assert read_manifest(source / "checkpoints/e000001-s000000").run == "a"
