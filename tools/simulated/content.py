"""What the weights of a simulated run depend on."""

from __future__ import annotations

import numpy as np

from shared.types import Group


def content_of(group: Group) -> bytes:
    """What of a group is trained on: neither when and where it was made, nor with how many attempts, nor by which
    version.
    """
    parts = [group.task.encode()]
    for one in group.trajectories:
        parts += [
            one.token_ids.tobytes(),
            one.loss_mask.tobytes(),
            one.logprobs.tobytes(),
            np.float64(one.reward).tobytes(),
        ]
    return b"".join(parts)
