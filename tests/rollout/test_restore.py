"""Restoring again and again, as a run does at each of its steps, takes no more memory."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np

from services.rollout.engines.sglang_jax.weights.restore import restore
from tests.support import models


def n_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_nothing_is_left_of_a_restore(tmp_path: Path) -> None:
    config = models.tiny_config()
    folders = [
        models.write_checkpoint(tmp_path, f"e000001-s{i:06d}", config, models.random_weights(config, i))
        for i in range(4)
    ]
    for folder in folders[:2]:
        restore(str(folder / "params"), "orbax")
    before = n_objects()
    for _ in range(5):
        for folder in folders:
            restore(str(folder / "params"), "orbax")
    assert n_objects() - before < 20


def test_checkpoints_of_different_trees_are_told_apart(tmp_path: Path) -> None:
    small, large = models.tiny_config(), json.loads(Path("configs/models/tiny/config.json").read_text())
    found = []
    for name, config in (("a", small), ("b", large), ("c", small)):
        folder = models.write_checkpoint(tmp_path / name, "e000001-s000001", config, models.random_weights(config, 0))
        found.append(restore(str(folder / "params"), "orbax"))
    assert found[0].keys() == found[2].keys()
    assert all(np.array_equal(found[0][key], found[2][key]) for key in found[0])
    assert {key: value.shape for key, value in found[0].items()} != {
        key: value.shape for key, value in found[1].items()
    }
