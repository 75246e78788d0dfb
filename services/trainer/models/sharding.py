"""Arrays between the host and a mesh whose devices may belong to several processes.

Invariant: no process ever needs more of a value than its own devices hold, but for what `to_host` gathers.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The whole value on every device: what a process may read although others have devices of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def place(value: Any, sharding: jax.sharding.Sharding, dtype: Any = None) -> jax.Array:
    """The value on its devices. What can be sliced (an array of numpy, one that lies in a file) is read slice by slice,
    only those that are held here; every process gives the same value.
    """
    if isinstance(value, jax.Array):
        return jax.device_put(value if dtype is None else value.astype(dtype), sharding)
    dtype = value.dtype if dtype is None else dtype
    return jax.make_array_from_callback(
        tuple(value.shape), sharding, lambda index: np.asarray(value[index]).astype(dtype, copy=False)
    )


def placed_tree(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """A tree of numpy's arrays on the devices, all divided alike."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: place(x, sharding), tree)


def to_host(x: jax.Array) -> np.ndarray:
    """The whole array in host memory, of every process: all of them have to call it, in the same order."""
    if not x.is_fully_addressable and not x.is_fully_replicated:
        x = jax.jit(lambda y: y, out_shardings=replicated(x.sharding.mesh))(x)
    return np.asarray(x)
