"""What a trainer of several processes publishes: process 0 makes the chunks, and each array is gathered there from all,
one after the other.

Invariant: all processes gather the same arrays in the same order, whatever process 0 meets meanwhile: a disk that is
full ends the publishing, not the gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from services.trainer.multihost.processes import Follower, Leader
from services.trainer.publishing.publications import Arrays, Publications, PublishedVersion
from shared.published.chunks import in_order
from shared.published.manifest import Chunk, PublishedAdapter, WeightTree
from shared.run.checkpoint_files import ManifestLeaf, Probe
from shared.types import WeightVersion


class LeadingPublications:
    """Process 0's, around `Publications`."""

    def __init__(self, own: Publications, leader: Leader) -> None:
        self._own, self._leader = own, leader
        self._base: WeightTree | None = None

    def publish(
        self,
        version: WeightVersion,
        leaves: Sequence[ManifestLeaf],
        arrays: Arrays,
        model: Mapping[str, Any],
        probe: Probe | None,
        adapter: PublishedAdapter | None = None,
    ) -> PublishedVersion:
        """See `Publications.publish`."""
        gathered = _Gathered(leaves, arrays)
        try:
            published = self._own.publish(version, leaves, gathered.takes(), model, probe, adapter)
        finally:
            gathered.rest()
        self._leader.tell("value", value=None)
        return published

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree:
        """See `Publications.base`."""
        if self._base is not None:
            return self._base
        gathered = _Gathered(leaves, arrays)
        try:
            base = self._own.base(epoch, leaves, gathered.takes())
        finally:
            gathered.rest()
        self._leader.tell("value", value=None)
        self._base = base
        return base


class FollowingPublications:
    """Any other process's: takes part in the gathering, and publishes nothing."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._base: WeightTree | None = None

    def publish(
        self,
        version: WeightVersion,
        leaves: Sequence[ManifestLeaf],
        arrays: Arrays,
        model: Mapping[str, Any],
        probe: Probe | None,
        adapter: PublishedAdapter | None = None,
    ) -> PublishedVersion:
        """Raises the error that process 0 met."""
        _Gathered(leaves, arrays).rest()
        self._follower.told()
        return PublishedVersion(version, Chunk("", 0), "", 0, 0, {})

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree:
        """Raises the error that process 0 met."""
        if self._base is None:
            _Gathered(leaves, arrays).rest()
            self._follower.told()
            self._base = WeightTree(tuple(leaves), ())
        return self._base


class _Gathered:
    """Arrays in the order in which chunks are made of them; each is gathered once."""

    def __init__(self, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> None:
        self._left: dict[str, Callable[[], np.ndarray]] = {leaf.key: arrays[leaf.key] for leaf in in_order(leaves)}

    def takes(self) -> Arrays:
        return {name: partial(self._take, name) for name in self._left}

    def rest(self) -> None:
        """Those that nobody took."""
        for name in list(self._left):
            self._take(name)

    def _take(self, name: str) -> np.ndarray:
        return self._left.pop(name)()
