"""Content of a group that the weights of a simulated run depend on."""

from __future__ import annotations

import numpy as np

from shared.types import Group


def content_of(group: Group) -> bytes:
    """Trained content of a group: without times, servers, attempts and versions of its making."""
    parts = [group.task.encode()]
    for one in group.trajectories:
        parts += [
            one.token_ids.tobytes(),
            one.loss_mask.tobytes(),
            one.logprobs.tobytes(),
            np.float64(one.reward).tobytes(),
        ]
        for branch in one.branches:
            parts += [
                np.array([branch.parent, branch.shared]).tobytes(),
                branch.token_ids.tobytes(),
                branch.loss_mask.tobytes(),
                branch.logprobs.tobytes(),
            ]
    return b"".join(parts)
