"""The plain values that a model is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.trainer.models.lora import LoraOptions
from services.trainer.models.splash import Attention
from shared.models.origin import Origin

type Remat = Literal["none", "block", "decoder"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`folder` holds config.json and the weights, if they are not to be random; `dtype` is that of activations and
    published parameters.

    `origin` is a version of another run whose weights a new run begins with. With `lora`, RL trains adapters of the
    weights that it begins with; the warm start trains all parameters. With `routing_replay` the tokens of RL are sent
    to the experts of the engine's choice.
    """

    folder: Path
    dtype: str
    remat: Remat
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    seed: int
    origin: Origin | None = None
    lora: LoraOptions | None = None
    routing_replay: bool = True
    attention: Attention = "auto"
    random_weights: bool = False
