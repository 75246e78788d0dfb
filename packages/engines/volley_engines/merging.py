"""Merge the adapters of a version into their base, for engines that load whole weights only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.opening import bound_leaves, open_arrays, open_base
from services.rollout.engines.arrays.restore import CheckpointLeaf
from services.rollout.engines.staged import StagedWeights
from shared.errors import WeightsError
from shared.models import adapter


class BaseCache:
    """Base of the adapters that were loaded last, kept in host memory so that it is read once."""

    def __init__(self) -> None:
        self._held: tuple[str, Mapping[str, np.ndarray]] = ("", {})

    def arrays(self, weights: StagedWeights, arrival: Arrival) -> Mapping[str, np.ndarray]:
        """Return the arrays of the adapters' base by the trainer's names; without a base, none, and the cache is
        emptied.

        Raises as `open_arrays`.
        """
        held, base = self._held, weights.base
        if base is None or held[0] != base.digest:
            held = self._held = ("", {})
        if base is not None and held[0] != base.digest:
            with open_base(weights, base, arrival) as found:
                held = self._held = base.digest, {name: np.array(leaf.read()) for name, leaf in found.items()}
        return held[1]


@contextmanager
def open_merged(weights: StagedWeights, arrival: Arrival, bases: BaseCache) -> Iterator[Mapping[str, CheckpointLeaf]]:
    """Open whole weights; adapters are merged into the base that `bases` keeps, in its dtype.

    Raises as `open_arrays`.
    """
    base = bases.arrays(weights, arrival)
    with open_arrays(weights, arrival) as found:
        yield _merged(base, found, weights.base.scale) if weights.base else found


def _merged(
    base: Mapping[str, np.ndarray], found: Mapping[str, CheckpointLeaf], scale: float
) -> Mapping[str, CheckpointLeaf]:
    """Merge adapters into their base, one array at a time, in its dtype."""
    bound_leaves(found, max(value.size for value in base.values()))
    try:
        reads = adapter.merged(
            {name: partial(np.asarray, value) for name, value in base.items()},
            {name: leaf.read for name, leaf in found.items()},
            scale,
        )
    except ValueError as error:
        raise WeightsError(str(error), "load adapters that were trained on this base") from error
    return {
        name: CheckpointLeaf(base[name].shape, base[name].dtype, partial(_rounded, read, base[name].dtype))
        for name, read in reads.items()
    }


def _rounded(read: Callable[[], np.ndarray], dtype: np.dtype) -> np.ndarray:
    return read().astype(dtype, copy=False)
