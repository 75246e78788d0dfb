"""Plain values that a model is made from."""

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
    """Options of the trained model.

    Attributes:
        folder: holds config.json, and the weights unless they are random.
        dtype: of activations and of published parameters.
        origin: version of another run that a new run takes its weights from.
        lora: RL trains adapters of its first weights; the warm start always trains all parameters.
        routing_replay: RL routes tokens to the experts that the engine chose.
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
