"""A program of the trainer's environment: scores the tokens `ids.npy` in folders of models, into `logprobs.npy`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from services.trainer.batches.batch import BatchLayout, micro_batches, supervised_row
from services.trainer.learner.scoring import Scorer, params_of
from services.trainer.models import family
from services.trainer.models.initial_weights import leaves_of
from shared.models.config import ModelConfig


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        described, ids = ModelConfig.read(folder), np.load(folder / "ids.npy")
        mesh = family.make_mesh((1, 1), ("fsdp", "tp"))
        model = family.build(described, leaves_of(folder, described, seed=0), mesh, dtype="float32")
        rows = [supervised_row(ids.tolist(), [1] * len(ids))]
        (batch,) = micro_batches(rows, np.ones(1), BatchLayout((len(ids),), 1, 0), 1)
        np.save(folder / "logprobs.npy", Scorer(model, 1.0).logprobs(params_of(model), batch)[0, : len(ids) - 1])


if __name__ == "__main__":
    main()
