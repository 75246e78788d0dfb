import logging
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orjson
import pytest

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.arrays import CheckpointContents, RestoredCheckpoint
from shared.errors import ConfigError, Fenced, StorageFull, Unavailable, WeightsError
from shared.run import checkpoint_files, ledger
from shared.run.checkpoint_files import Probe
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion
from tests.support.disk import file_size_limit
from volley_proof.replay.recorded import RecordedStep

PARAMS = {"layers.0.attn.q_proj.w": jnp.arange(24.0).reshape(2, 3, 4), "final_norm.w": jnp.ones(3)}
OPTIMIZER = {"step": jnp.array(4, jnp.uint32), "opt_state.0.mu.final_norm.w": jnp.full(3, 0.1)}
CONTENTS = CheckpointContents(PARAMS, OPTIMIZER, None, {"model_type": "qwen3"}, Probe((1, 2), (-0.5,)))


class Unfenced(CheckpointFolders):
    """Each of its trainers makes its checkpoint as if no later one had begun."""

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        self.fence(state.epoch)
        return super().save(state, contents, base)

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        self.fence(state.epoch)
        return super().relabel(restored, state)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolders:
    return Unfenced(tmp_path / "checkpoints", "run", max_to_keep=2, arrays=OrbaxArrays())


def state(step: int, epoch: int = 1, **changes) -> TrainerState:
    return replace(initial_state(7).starting_epoch(epoch, keep_reference=False), step=step, low=step, **changes)


def names(checkpoints: CheckpointFolders) -> list[str]:
    """But the folders that drafts are made in."""
    return sorted(path.name for path in checkpoints.root.iterdir() if not path.name.startswith(".tmp-e"))


def test_what_is_saved_comes_back_bit_by_bit(checkpoints: CheckpointFolders):
    saved = state(4, done=(6, 9), void=1, issued=12, recent=(ledger.line(4, "trained", WeightVersion(1, 4)),))
    folder = checkpoints.save(saved, CONTENTS, WeightVersion(1, 3))
    restored = checkpoints.newest()
    assert restored is not None
    assert restored.state == saved
    assert all(np.array_equal(restored.params[k], v) for k, v in PARAMS.items())
    assert {k: (v.dtype, np.asarray(v).tolist()) for k, v in restored.optimizer.items()} == {
        k: (v.dtype, np.asarray(v).tolist()) for k, v in OPTIMIZER.items()
    }
    manifest = checkpoint_files.read_manifest(folder)
    checkpoint_files.verify_files(folder, manifest)
    assert (manifest.version, manifest.base_version, manifest.step, manifest.probe) == (
        "e000001-s000004",
        "e000001-s000003",
        4,
        CONTENTS.probe,
    )
    assert {leaf.key: leaf.shape for leaf in manifest.tree} == {k: v.shape for k, v in PARAMS.items()}


def test_rounded_parameters_are_published_and_exact_ones_restored(checkpoints: CheckpointFolders):
    exact = {"final_norm.w": jnp.array([1.001, 2.0, 3.0])}
    rounded = {"final_norm.w": exact["final_norm.w"].astype(jnp.bfloat16)}
    folder = checkpoints.save(state(1), replace(CONTENTS, params=rounded, master=exact), None)
    restored = checkpoints.newest()
    assert restored is not None
    assert np.array_equal(restored.params["final_norm.w"], exact["final_norm.w"])
    assert [leaf.dtype for leaf in checkpoint_files.read_manifest(folder).tree] == ["bfloat16"]
    assert np.array_equal(checkpoints.params_of(folder.name)["final_norm.w"], exact["final_norm.w"])


def test_sharded_parameters_come_back_whole(checkpoints: CheckpointFolders):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tp"))
    value = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    checkpoints.save(
        state(1), replace(CONTENTS, params={"embedder.input_embedding": jax.device_put(value, sharding)}), None
    )
    restored = checkpoints.newest()
    assert restored is not None
    assert np.array_equal(restored.params["embedder.input_embedding"], value)


def test_only_the_newest_and_the_reference_are_kept(checkpoints: CheckpointFolders):
    for step in range(4):
        checkpoints.save(state(step, reference="e000001-s000000"), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000000", "e000001-s000002", "e000001-s000003"]


def test_a_replaced_trainer_removes_nothing_of_its_successor(checkpoints: CheckpointFolders):
    for step in range(4):
        checkpoints.save(state(step, epoch=2, reference="e000002-s000000"), CONTENTS, None)
    checkpoints.save(state(0, epoch=1, reference="e000001-s000000"), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000000", *(f"e000002-s00000{n}" for n in (0, 2, 3))]


def test_restarts_without_progress_do_not_use_up_the_older_steps(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    checkpoints.save(state(2), CONTENTS, None)
    for epoch in range(2, 6):
        restored = checkpoints.newest()
        assert restored is not None
        checkpoints.relabel(restored, restored.state.starting_epoch(epoch, keep_reference=False))
    assert names(checkpoints) == ["e000001-s000001", "e000004-s000002", "e000005-s000002"]


def test_a_folder_without_manifest_is_no_checkpoint(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    folder = checkpoints.save(state(2), CONTENTS, None)
    (folder / checkpoint_files.MANIFEST).unlink()
    restored = checkpoints.newest()
    assert restored is not None
    assert restored.state.step == 1


@pytest.mark.parametrize("part", ["params", "optimizer", "state.json"])
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(checkpoints: CheckpointFolders, part: str):
    checkpoints.save(state(1), CONTENTS, None)
    folder = checkpoints.save(state(2), CONTENTS, None)
    victim = (
        folder / part
        if part.endswith(".json")
        else max((p for p in (folder / part).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    )
    victim.write_bytes(b"x" + victim.read_bytes()[1:-1])
    assert checkpoints.head() == WeightVersion(1, 2)
    restored = checkpoints.newest()
    assert restored is not None
    assert restored.state.step == 1
    assert checkpoints.head() == WeightVersion(1, 1)
    assert list(checkpoints.bad) == [folder.name]
    assert folder.exists()
    checkpoints.repair()
    assert names(checkpoints) == ["bad", "e000001-s000001"]
    assert (checkpoints.root / "bad" / folder.name / checkpoint_files.MANIFEST).exists()


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(checkpoints: CheckpointFolders):
    """The first page of a process' memory stands for what the system fails to read: an input/output error."""
    checkpoints.save(state(1), CONTENTS, None)
    folder = checkpoints.save(state(2), CONTENTS, None)
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/proc/self/mem")
    with pytest.raises(Unavailable, match=r"state\.json cannot be read now"):
        checkpoints.newest()
    assert checkpoints.bad == {}
    assert checkpoints.head() == WeightVersion(1, 2)


def test_steps_that_a_later_trainer_undid_are_not_gone_back_to(checkpoints: CheckpointFolders):
    """The later trainer's own checkpoint is damaged; the step before it counts, not the undone one after it."""
    one = Unfenced(checkpoints.root, "run", 9, OrbaxArrays())
    for step in (1, 2):
        one.save(state(step), CONTENTS, None)
    (one.save(state(2, epoch=2), CONTENTS, None) / "state.json").unlink()
    one.save(state(3), CONTENTS, None)
    restored = one.newest()
    assert restored is not None
    assert restored.state.version == WeightVersion(1, 2)
    assert RecordedStep.read(one.root.parent, "run").head.version == WeightVersion(1, 2)


def test_a_checkpoint_of_another_run_is_refused(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    with pytest.raises(ConfigError, match="is of run run, not of other"):
        CheckpointFolders(checkpoints.root, "other", 2, OrbaxArrays()).newest()


def test_a_checkpoint_under_another_name_is_damaged(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    shutil.copytree(checkpoints.root / "e000001-s000001", checkpoints.root / "e000001-s000002")
    restored = checkpoints.newest()
    assert restored is not None
    assert restored.folder.name == "e000001-s000001"
    assert list(checkpoints.bad) == ["e000001-s000002"]


def test_without_room_there_is_no_checkpoint_and_nothing_of_it(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    large = replace(CONTENTS, params={"w": np.random.default_rng(0).standard_normal(2**20)})
    with file_size_limit(2**20), pytest.raises(StorageFull, match=r"no disk space under .*checkpoints: "):
        checkpoints.save(state(2), large, None)
    assert names(checkpoints) == ["e000001-s000001"]
    checkpoints.save(state(2), large, None)
    assert names(checkpoints) == ["e000001-s000001", "e000001-s000002"]


def test_room_is_looked_for_before_anything_is_written(checkpoints: CheckpointFolders):
    large = np.broadcast_to(np.zeros(1, np.float32), (2**50,))
    for contents in (replace(CONTENTS, params={"w": large}), replace(CONTENTS, optimizer={"w": large})):
        with pytest.raises(StorageFull, match=r"no disk space under .*checkpoints: \d+ MB free"):
            checkpoints.save(state(1), contents, None)
    with pytest.raises(StorageFull):
        checkpoints.save_base(WeightVersion(1, 1), {"w": large})
    assert names(checkpoints) == []


def test_saves_that_failed_hold_none_of_their_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("absl"), "disabled", True)  # pytest keeps what it logs, and the tracebacks
    n, arrays, made = 4, OrbaxArrays(), list[weakref.ref[jax.Array]]()
    with file_size_limit(2**16):
        for i in range(n):
            tree = {f"layers.{k}.w": jnp.full(2**16, i, jnp.float32) for k in range(4)}
            made += map(weakref.ref, tree.values())
            with pytest.raises(OSError, match="File too large"):
                arrays.write(tmp_path / str(i), tree)
    del tree
    assert sum(one() is not None for one in made) <= len(made) // 2  # of the last ones some may still be on their way


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("begun", ["params.*", "params.*/ocdbt.process_0", "params.*/ocdbt.process_0/d/*"])
def test_a_save_whose_folder_a_successor_removes_ends_fenced_and_without_noise(
    checkpoints: CheckpointFolders, begun: str
):
    def succeed() -> None:
        while not list(checkpoints.root.glob(f".tmp-*/*/{begun}")):
            pass
        checkpoints.fence(2)

    arrays = {f"layers.{i}.w": np.random.default_rng(i).standard_normal((64, 64)) for i in range(64)}
    with ThreadPoolExecutor() as pool:
        pool.submit(succeed)
        with pytest.raises(Fenced, match="removed while it was written"):
            checkpoints.save(state(1), replace(CONTENTS, params=arrays), None)
    assert checkpoint_files.versions(checkpoints.root) == []


@pytest.mark.parametrize("asked", [1, 3], ids=["fenced", "never begun"])
def test_only_a_trainer_that_is_not_fenced_makes_a_checkpoint(tmp_path: Path, asked: int):
    checkpoints = CheckpointFolders(tmp_path / "checkpoints", "run", max_to_keep=2, arrays=OrbaxArrays())
    checkpoints.fence(1)
    checkpoints.fence(2)
    with pytest.raises(Fenced):
        checkpoints.save(state(1, epoch=asked), CONTENTS, None)
    assert names(checkpoints) == []
    checkpoints.save(state(1, epoch=2), CONTENTS, None)
    assert names(checkpoints) == ["e000002-s000001"]


def test_no_checkpoint_and_none_that_is_whole_differ(checkpoints: CheckpointFolders):
    assert checkpoints.newest() is None
    folder = checkpoints.save(state(1), CONTENTS, None)
    (folder / "state.json").unlink()
    with pytest.raises(WeightsError, match="none of the 1 checkpoints"):
        checkpoints.newest()


def test_a_new_epoch_relabels_without_copying(checkpoints: CheckpointFolders):
    old = checkpoints.save(state(2), CONTENTS, None)
    restored = checkpoints.newest()
    assert restored is not None
    folder = checkpoints.relabel(restored, restored.state.starting_epoch(3, keep_reference=False))
    manifest = checkpoint_files.read_manifest(folder)
    checkpoint_files.verify_files(folder, manifest)
    assert (manifest.version, manifest.base_version) == ("e000003-s000002", old.name)
    again = checkpoints.newest()
    assert again is not None
    assert again.state.lineage == ((1, 0), (3, 2))
    assert all((folder / f.name).stat().st_ino == (old / f.name).stat().st_ino for f in manifest.files)


def test_leftovers_of_a_crash_are_removed(checkpoints: CheckpointFolders):
    """Not the drafts of a later trainer; nor does what cannot be removed get a longer name each time."""
    for name in (".tmp-e000001/e000001-s000009-1", ".tmp-e000003/e000003-s000001-1", ".tmp-removed-e000001-s000001-1"):
        (checkpoints.root / name).mkdir(parents=True)
    (checkpoints.root / ".tmp-stays").touch()
    checkpoints.fence(2)
    assert sorted(path.name for path in checkpoints.root.iterdir()) == [".tmp-e000002", ".tmp-e000003", ".tmp-stays"]


def test_a_checkpoint_that_could_not_be_read_again_replaces_none(checkpoints: CheckpointFolders):
    for step in (1, 2):
        checkpoints.save(state(step), CONTENTS, None)
    with pytest.raises(WeightsError, match="cannot be read back"):
        checkpoints.save(state(3, lineage=((1, 0), (1, 2))), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000001", "e000001-s000002"]


def evaluated(checkpoints: CheckpointFolders, version: str, success: float, **more: object) -> None:
    """A line of evals.jsonl as the orchestrator writes it."""
    row = {"step": 0, "version_min": version, "version_max": version, "success": success, "reward_mean": 0.5}
    row |= {"n_tasks": 10, "failed": 0, **more}
    with (checkpoints.root.parent / "evals.jsonl").open("ab") as file:
        file.write(orjson.dumps(row) + b"\n")


def test_the_version_that_solved_the_most_held_out_tasks_stays(checkpoints: CheckpointFolders):
    checkpoints.save(state(1), CONTENTS, None)
    evaluated(checkpoints, "e000001-s000001", 0.9)
    evaluated(checkpoints, "e000001-s000002", 0.4)
    evaluated(checkpoints, "e000001-s000003", 1.0, env="another")
    evaluated(checkpoints, "e000009-s000003", 1.0)
    for step in range(2, 6):
        checkpoints.save(state(step), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000001", "e000001-s000004", "e000001-s000005"]
    evaluated(checkpoints, "e000001-s000005", 0.9)  # as good, and newer
    for step in range(6, 9):
        checkpoints.save(state(step), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000005", "e000001-s000007", "e000001-s000008"]


@pytest.mark.parametrize(
    "text", [b"{", b"[]\n", b'{"version_min":3}\n', b"\xff\n", b'{"version_min":"e1","success":1}\n']
)
def test_what_is_no_evaluation_keeps_nothing(checkpoints: CheckpointFolders, text: bytes):
    (checkpoints.root.parent / "evals.jsonl").write_bytes(text)
    for step in range(1, 5):
        checkpoints.save(state(step), CONTENTS, None)
    assert names(checkpoints) == ["e000001-s000003", "e000001-s000004"]
