"""Publishing by a trainer of several processes: arrays are gathered one by one; process 0 makes the chunks.

Invariant: all processes gather the same arrays in the same order, even if process 0 fails meanwhile: a full disk ends
the publishing, not the gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from services.trainer.publishing.publications import Arrays, ModelPublications, ModelToPublish, PublishedVersion
from shared.published.chunks import in_order
from shared.published.manifest import Chunk, WeightTree
from shared.run.checkpoint_files import ManifestLeaf
from shared.types import WeightVersion
from volley_multihost.processes import Follower, Leader


class LeadingPublications:
    """`Publications` of process 0."""

    def __init__(self, own: ModelPublications, leader: Leader) -> None:
        self._own, self._leader = own, leader
        self._base: WeightTree | None = None

    def publish(self, version: WeightVersion, model: ModelToPublish) -> PublishedVersion:
        """See `Publications.publish`."""
        gathered = _Gathered(model.leaves, model.arrays)
        try:
            published = self._own.publish(version, replace(model, arrays=gathered.takes()))
        finally:
            gathered.rest()
        self._leader.send("value", value=None)
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
        self._leader.send("value", value=None)
        self._base = base
        return base


class FollowingPublications:
    """Publications of a follower, which only takes part in gathering."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._base: WeightTree | None = None

    def publish(self, version: WeightVersion, model: ModelToPublish) -> PublishedVersion:
        """Gather the arrays. Raises the error of process 0."""
        _Gathered(model.leaves, model.arrays).rest()
        self._follower.receive_value()
        return PublishedVersion(version, Chunk("", 0), "", 0, 0, {})

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree:
        """Gather the base once. Raises the error of process 0."""
        if self._base is None:
            _Gathered(leaves, arrays).rest()
            self._follower.receive_value()
            self._base = WeightTree(tuple(leaves), ())
        return self._base


class _Gathered:
    """Arrays in the order in which they are cut into chunks; each is gathered once."""

    def __init__(self, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> None:
        self._left: dict[str, Callable[[], np.ndarray]] = {leaf.key: arrays[leaf.key] for leaf in in_order(leaves)}

    def takes(self) -> Arrays:
        return {name: partial(self._take, name) for name in self._left}

    def rest(self) -> None:
        """Gather the arrays that were not taken."""
        for name in list(self._left):
            self._take(name)

    def _take(self, name: str) -> np.ndarray:
        return self._left.pop(name)()
