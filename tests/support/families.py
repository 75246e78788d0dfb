"""Small models of every family, whose log-probabilities transformers has computed: tests/fixtures/families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.models.config import ModelConfig
from tests.support import models

FOLDER = Path(__file__).parents[1] / "fixtures" / "families"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/expected.json"))


@dataclass(frozen=True)
class FamilyCase:
    """`written` is the config.json of transformers, `config` the one this project makes of it; `logprobs` float64 [n -
    1] are those of ids[1:] (int32 [n]) under `weights`. `gradient_norms` are those of the gradients of their negative
    mean, by the names of tensors in files. `experts` [n, L, k] are those of each token in ascending order, in the L
    layers that have some.
    """

    written: dict[str, Any]
    config: dict[str, Any]
    weights: models.Weights
    ids: np.ndarray
    logprobs: np.ndarray
    gradient_norms: dict[str, float]
    experts: np.ndarray | None


def case(name: str) -> FamilyCase:
    written = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    known = json.loads((FOLDER / name / "expected.json").read_text(encoding="utf-8"))
    config = ModelConfig.parse(written).to_hf()
    weights = models.random_weights(config, known["seed"])
    ids, logprobs = np.array(known["ids"], np.int32), np.array(known["logprobs"])
    experts = np.array(known["experts"]) if "experts" in known else None
    return FamilyCase(written, config, weights, ids, logprobs, known["gradient_norms"], experts)
