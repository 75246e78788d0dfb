"""Attention on TPUs by JAX's splash attention, whose kernels keep no scores in device memory.

Masks are those of `attention`, and results differ by rounding only.

The kernel computes the mask of a row with one sequence itself, causal or with a window. The mask of a packed row
depends on its sequences. Segment ids cannot express it, because several sequences see the tokens of a shared prefix. So
it is an array of four bytes per query and key, and the kernel skips its empty blocks. The array is made for `_QUERIES`
queries at a time, and made again in the backward pass, which keeps the kernel's results but not the mask. It has 32 MiB
for a row of 8,192 tokens and 128 MiB for 32,768, instead of 256 MiB and 4 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from services.trainer.models.attention import ScoreOptions, seen
from shared.errors import ConfigError
from shared.schema import SPLASH_UNIT

_BLOCKS, _QUERIES = (512, 256, SPLASH_UNIT), (1024, 512, 256, SPLASH_UNIT)
_KEPT = "splash"


@dataclass(frozen=True, slots=True)
class SplashKernels:
    """Splash attention as `services.trainer.models.splash.KernelAttention`."""

    mesh: Mesh

    @classmethod
    def on(cls, mesh: Mesh, platform: str) -> Self:
        """Make the kernels of a mesh. Raises ConfigError if the platform has none."""
        if platform != "tpu":
            raise ConfigError(
                "trainer.attention=splash has kernels for TPUs, and the trainer's devices are of the platform"
                f" {platform}",
                "trainer.attention=auto uses it on TPUs only",
            )
        return cls(mesh)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[1] % SPLASH_UNIT == 0 and shape[0] % self.mesh.shape["fsdp"] == 0

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible_until: jax.Array | None,
        options: ScoreOptions,
        positions: jax.Array,
    ) -> jax.Array:
        return attend(q, k, v, visible_until, options, positions, self.mesh)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible_until: jax.Array | None,
    options: ScoreOptions,
    positions: jax.Array,
    mesh: Mesh,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H], as `attention.attend`. Every device of the mesh computes its own rows and heads.

    Args:
        interpret: run JAX's interpreter of kernels, without a TPU.
    """
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    rows, heads = PartitionSpec("fsdp"), PartitionSpec("fsdp", "tp")
    of_device = partial(_unpacked if visible_until is None else _packed, options=options, interpret=interpret)
    packing = () if visible_until is None else (visible_until, positions)
    attended = jax.shard_map(
        of_device, mesh=mesh, in_specs=(heads,) * 3 + (rows,) * len(packing), out_specs=heads, check_vma=False
    )
    return attended(*(x.swapaxes(1, 2) for x in (scaled, k, v)), *packing).swapaxes(1, 2)


def _unpacked(q: jax.Array, k: jax.Array, v: jax.Array, *, options: ScoreOptions, interpret: bool) -> jax.Array:
    """Attention [B, N, T, H] of q [B, N, T, H], k and v [B, K, T, H]."""
    n_heads, length = q.shape[1:3]
    shape = (length, length)
    mask = (
        masks.CausalMask(shape) if options.window is None else masks.LocalMask(shape, (options.window - 1, 0), offset=0)
    )
    kernel = _kernel(masks.MultiHeadMask([mask] * n_heads), options, interpret=interpret)
    return jax.vmap(kernel)(q, k, v)


def _packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible_until: jax.Array,
    positions: jax.Array,
    *,
    options: ScoreOptions,
    interpret: bool,
) -> jax.Array:
    """Attention [B, N, T, H] of q, of k and v [B, K, T, H], and of visible_until and positions int32 [B, T].

    Rows, and parts of a row's queries, are computed one after the other.
    """
    _, n_heads, length, size = q.shape
    n_queries = _largest(_QUERIES, length)
    firsts = jnp.arange(0, length, n_queries)

    @partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(_KEPT))
    def of_queries(
        q: jax.Array, first: jax.Array, k: jax.Array, v: jax.Array, until: jax.Array, places: jax.Array
    ) -> jax.Array:
        mask = seen(first, n_queries, length, until[None], places[None], options.window)
        return _kernel(mask, options, interpret=interpret)(q, k.astype(q.dtype), v.astype(q.dtype))

    def of_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, until, places = row
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)  # so are the gradients, which parts add to each other
        parts = q.reshape(n_heads, -1, n_queries, size).swapaxes(0, 1)
        found = jax.lax.map(lambda part: of_queries(*part, k, v, until, places), (parts, firsts))
        return found.swapaxes(0, 1).reshape(n_heads, length, size)

    return jax.lax.map(of_row, (q, k, v, visible_until, positions))


def _kernel(
    mask: jax.Array | masks.MultiHeadMask, options: ScoreOptions, *, interpret: bool
) -> Callable[..., jax.Array]:
    """Kernel for one row, without residuals; a mask bool [1, T, S] holds for every head."""
    bq, bkv = (_largest(_BLOCKS, length) for length in mask.shape[1:])
    made: Any = kernels.make_splash_mha(
        mask,
        block_sizes=kernels.BlockSizes(
            block_q=bq, block_kv=bkv, block_q_dkv=bq, block_kv_dkv=bkv, block_q_dq=bq, block_kv_dq=bkv
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=options.softcap,
        residual_checkpoint_name=_KEPT,
        interpret=interpret,
    )
    is_dynamic = isinstance(mask, jax.Array)  # jax 0.12 makes a traced array of it, which it then branches on
    made.fwd_mask_info = made.fwd_mask_info._replace(is_dynamic_mask=is_dynamic)
    return made


def _largest(sizes: tuple[int, ...], length: int) -> int:
    """First size that divides the length."""
    return next(size for size in sizes if length % size == 0)
