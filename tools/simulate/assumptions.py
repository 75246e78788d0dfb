"""What the simulation takes for given: every constant with its unit and where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GB = 1e9


class Constant(NamedTuple):
    value: float
    unit: str
    source: str


_OURS = "make simulate ARGS=--measure: one core of an AMD EPYC of 2.6 GHz, with little beside it"
_PUBLISHED = "published measurements of other projects, TPU v6e"


def _ours(value: float, unit: str) -> Constant:
    return Constant(value, unit, _OURS)


class Assumptions(NamedTuple):
    """`send` and `receive` are of one process of ours, whatever its network could carry; `decode` is of the full bytes
    that come out. What is per core is multiplied by `cores`.
    """

    network: Constant = Constant(12.5 * GB, "B/s", "data sheet: 100 Gbit/s a host, each way")
    send: Constant = _ours(1.4 * GB, "B/s")
    receive: Constant = _ours(1.4 * GB, "B/s")
    latency: Constant = Constant(0.001, "s", "a request within a data centre, both ways and its parsing")
    served_at_once: Constant = Constant(8, "transfers", "of a source: shared/weights/serving.py")
    pulled_at_once: Constant = Constant(4, "transfers", "of a server: services/rollout/weights/pulling.py")
    take: Constant = Constant(11.5 * GB, "B/s", f"{_PUBLISHED}: device to host")
    place: Constant = Constant(16.4 * GB, "B/s", f"{_PUBLISHED}: host to device")
    hash: Constant = _ours(6.5 * GB, "B/s a core")
    encode: Constant = _ours(2.2 * GB, "B/s a core")
    decode: Constant = _ours(7.5 * GB, "B/s a core")
    cores: Constant = Constant(4, "cores", "that work on one version at once, the transfers of a server")
    delta: Constant = Constant(0.03, "of full bytes", "aim of a delta in bfloat16 at a learning rate of 1e-6")
    check: Constant = Constant(0.5, "s", "probe and checksum: a prefill of 64 tokens and one pass over memory")
    swap: Constant = Constant(0.05, "s", "pause: one decode step")
    boot: Constant = Constant(60.0, "s", "start of a process on an accelerator, compiled programs in the cache")
    read: Constant = Constant(2.0 * GB, "B/s a host", "data sheet: network disk or bucket")
    state: Constant = Constant(12, "B a parameter", "float32 parameters and both moments of AdamW")
    tokens: Constant = Constant(2**20, "tokens a step", "512 episodes of 2,048 tokens")
    flops: Constant = Constant(197e12 * 0.4, "FLOP/s a chip", "data sheet of TPU v5e, of which training gets 40 %")

    def lines(self) -> list[str]:
        """A line each, for people."""
        return [f"{name:>14}  {c.value:>10.4g} {c.unit:<16} {c.source}" for name, c in self._asdict().items()]


@dataclass(frozen=True, slots=True)
class Size:
    """A model: all parameters, those that a token uses, and hosts of eight chips that train it."""

    name: str
    parameters: float
    active: float
    hosts: int

    @property
    def published(self) -> float:
        """Bytes of a version in bfloat16."""
        return 2 * self.parameters


SIZES = (Size("4B", 4e9, 4e9, 1), Size("32B", 32e9, 32e9, 8), Size("235B", 235e9, 22e9, 64))
SERVERS = (8, 64, 512)
CHIPS_PER_HOST = 8
