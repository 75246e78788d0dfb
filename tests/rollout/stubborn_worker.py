"""The real engine, dishonest: it acknowledges new weights, labels tokens with them, and keeps computing with its first
ones.

Told to flush its cache it also loses a bit of its memory: the lowest of one weight.
"""

import os
import sys

import jax
import numpy as np

from services.rollout.engines.sglang_jax import boot, worker
from services.rollout.engines.sglang_jax.scheduling.adapters import EngineWeights
from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler


class Stubborn(RolloutScheduler):
    def swap(self, weights: EngineWeights, version: str, mode: str) -> dict:
        kept = weights if self.version is None else weights._replace(leaves=self.runner.model_state_leaves)
        return super().swap(kept, version, mode)

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
