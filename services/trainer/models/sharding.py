"""Arrays between the host and a mesh whose devices may belong to several processes.

Invariant: no process needs more of a value than its own devices hold, except in `to_host`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Sharding with the whole value on every device, so that every process can read it."""
    return NamedSharding(mesh, PartitionSpec())


def place(value: Any, sharding: jax.sharding.Sharding, dtype: Any = None) -> jax.Array:
    """Place a value on its devices; every process passes the same value.

    Of an array of numpy or in a file, only the slices of this process's devices are read.
    """
    if isinstance(value, jax.Array):
        return jax.device_put(value if dtype is None else value.astype(dtype), sharding)
    dtype = value.dtype if dtype is None else dtype
    return jax.make_array_from_callback(
        tuple(value.shape), sharding, lambda index: np.asarray(value[index]).astype(dtype, copy=False)
    )


def placed_tree(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Place a tree of numpy arrays with one sharding."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: place(x, sharding), tree)


def to_host(x: jax.Array) -> np.ndarray:
    """Copy the whole array to host memory. All processes must call this, in the same order."""
    if not x.is_fully_addressable and not x.is_fully_replicated:
        assert isinstance(x.sharding, NamedSharding)
        assert isinstance(x.sharding.mesh, jax.sharding.Mesh)
        x = jax.jit(lambda y: y, out_shardings=replicated(x.sharding.mesh))(x)
    return np.asarray(x)
