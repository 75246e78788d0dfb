"""The real engine, dishonest: it acknowledges new weights, labels tokens with them, and keeps computing with its first
ones.

Told to flush its cache it also loses a bit of its memory: the lowest of one weight.
"""

import os
import sys

import jax
import numpy as np

from services.rollout.engines.sglang_jax import boot, worker
from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler


class Stubborn(RolloutScheduler):
    def swap(self, leaves: list, version: str, mode: str) -> dict:
        return super().swap(leaves if self.version is None else self.runner.model_state_leaves, version, mode)

    def flush(self) -> None:
        first, *rest = self.runner.model_state_leaves
        lossy = np.array(first)
        lossy.flat[0] = np.nextafter(lossy.flat[0], np.float32(9))
        self.runner.model_state_leaves = [jax.device_put(lossy, first.sharding), *rest]
        super().flush()


if __name__ == "__main__":
    boot.RolloutScheduler = Stubborn
    code = worker.main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
