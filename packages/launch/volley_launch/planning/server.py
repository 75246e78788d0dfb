"""Memory of a rollout server with Volley's own engine, on each of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.planning.serving import ITEM_SIZES, of_run
from shared.schema import RunConfig
from volley_launch.planning.devices import DeviceType


@dataclass(frozen=True, slots=True)
class ServerEstimate:
    """Bytes on each device of a rollout server.

    Attributes:
        weights: of the serving version.
        arriving: a second copy of the weights, while a new version is loaded beside the serving one; on a CPU also the
            largest array as it was read.
        step: intermediate values of the largest prefill or decode.
        token: keys and values of one token in the pool.
        pool_tokens: size of the pool in tokens; 0 or less if there is no room for one.
        most_tokens: largest pool that leaves room for the rest.
        limit: bytes that the device has for all of it.
        context_length: tokens of the longest sequence.
    """

    weights: int
    arriving: int
    step: int
    token: int
    pool_tokens: int
    most_tokens: int
    limit: int
    context_length: int

    @property
    def pool(self) -> int:
        return self.token * max(0, self.pool_tokens)

    @property
    def total(self) -> int:
        return self.weights + self.arriving + self.step + self.pool

    @property
    def n_sequences(self) -> int:
        """Sequences of the full length that the pool holds at once."""
        return max(0, self.pool_tokens) // self.context_length


def estimate(config: RunConfig, model: ModelConfig, device: DeviceType) -> ServerEstimate:
    """Estimate the memory of one server of the run on such devices; on a CPU, that of all its processes together."""
    engine, found = config.rollout.engine, of_run(config, model, device.platform)
    arriving = found.weights
    if device.platform == "cpu":
        arriving += ITEM_SIZES[config.model.dtype] * max(one.n for one in parameters(model).values())
        most = (device.usable - found.weights - arriving - found.step) // found.token
        pool = found.default_pool(engine.max_running_requests, engine.context_length, device.memory)
    else:
        pool = found.accelerator_pool(engine.max_running_requests, engine.context_length, device.usable)
        most = found.largest_pool(device.usable, full=engine.max_total_tokens is not None)
    pool = engine.max_total_tokens or pool
    return ServerEstimate(
        found.weights, arriving, found.step, found.token, pool, most, device.usable, engine.context_length
    )
