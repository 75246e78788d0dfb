"""Splash attention on TPUs, whose kernels a package brings (part `splash`)."""

from __future__ import annotations

from typing import Literal, Protocol

import jax

from services.trainer.models.attention import ScoreOptions
from shared import packages

type Attention = Literal["auto", "blocks", "splash"]


class KernelAttention(Protocol):
    """Kernels of one mesh; hashable."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if queries of this shape [B, T, N, H] suit the kernels; others need `attention.attend`."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible_until: jax.Array | None,
        options: ScoreOptions,
        positions: jax.Array,
    ) -> jax.Array:
        """Attention [B, T, N, H], as `attention.attend`."""
        ...


def splash_kernels(attention: Attention, mesh: jax.sharding.Mesh, platform: str) -> KernelAttention | None:
    """Return the kernels that a model on this mesh uses; None if it uses none.

    Args:
        platform: for which the step is compiled; that of the mesh, or the one that it is lowered for.

    Raises ConfigError if splash attention is required, and the platform has none or the package is not installed.
    """
    if attention == "blocks" or (attention == "auto" and platform != "tpu"):
        return None
    opened = packages.part("splash", required=attention == "splash")
    return None if opened is None else opened(mesh, platform)
