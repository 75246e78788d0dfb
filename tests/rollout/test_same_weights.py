"""A version whose weights serve already is loaded by nobody, and only where the engine's arrays are the very ones."""

from types import SimpleNamespace

import pytest

from services.rollout.engines.sglang_jax.loading import checksum, staging
from services.rollout.engines.sglang_jax.loading.staging import LoadedArrays
from services.rollout.engines.sglang_jax.scheduling.adapters import EngineWeights
from services.rollout.engines.sglang_jax.worker import EngineWorker
from services.rollout.engines.staged import StagedWeights
from tests.rollout.server import wait_until

ARRAYS = ["array a", "array b"]


class Link:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        pass


class Scheduler:
    """Swaps what it is given, as the real one does."""

    def __init__(self) -> None:
        self.version, self.runner = "base", SimpleNamespace()
        self.step = SimpleNamespace(weights=EngineWeights([], {}))

    def swap(self, weights: EngineWeights, version: str, mode: str) -> dict:
        self.step.weights, self.version = weights, version
        return {"continued": 0, "aborted": 0}


class Engine:
    """The worker without a process; `n_loaded` counts what was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.scheduler, self.n_loaded = Link(), Scheduler(), 0
        self.worker = EngineWorker(self.link, self.scheduler, "float32", grammars=None)
        monkeypatch.setattr(staging, "load_leaves", self._load)
        monkeypatch.setattr(checksum, "checksum", lambda leaves: f"checksum of {leaves}")

    def _load(self, *_) -> LoadedArrays:
        self.n_loaded += 1
        return LoadedArrays(EngineWeights(list(ARRAYS), {}), checksum.checksum(list(ARRAYS)), {"read_s": 1.0}, None)

    def stage(self, version: str, digest: str, kind: str = "chunks") -> dict:
        n = len(self.link.sent)
        self.worker._stage(n, StagedWeights("nowhere", version, digest, kind=kind))

        def answered() -> bool:
            while not self.worker._loaded.empty():
                self.worker._loaded.get()()
            return len(self.link.sent) > n

        wait_until(answered)
        return self.link.sent[n]["value"]

    def serve(self, version: str, digest: str) -> dict:
        staged = self.stage(version, digest)
        assert self.worker._on_commit({"version": version, "mode": "retract"})["live"]["version"] == version
        return staged


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_the_weights_that_serve_become_another_version_without_a_load(engine):
    first = engine.serve("v1", "same")
    arrays = engine.scheduler.step.weights.leaves
    again = engine.serve("v2", "same")
    assert (engine.n_loaded, engine.scheduler.version) == (1, "v2")
    assert engine.scheduler.step.weights.leaves is arrays
    assert again["checksum"] == first["checksum"]
    engine.serve("v3", "other")
    assert engine.n_loaded == 2


def test_arrays_that_are_not_those_that_were_committed_are_loaded_anew(engine):
    engine.serve("v1", "same")
    engine.scheduler.step.weights = EngineWeights(["array a", "another"], {})
    engine.serve("v2", "same")
    assert engine.n_loaded == 2
    assert engine.scheduler.step.weights.leaves == ARRAYS


def test_arrays_that_lost_a_bit_are_loaded_anew(engine):
    """The very arrays, with other contents: an audit distrusts them, and the watcher stages their version again."""
    engine.serve("v1", "same")
    engine.scheduler.step.weights.leaves[0] = flipped = "array A"
    assert engine.worker._known.weights.leaves[0] is flipped
    again = engine.serve("v1", "same")
    assert engine.n_loaded == 2
    assert again["checksum"] == f"checksum of {ARRAYS}"
    assert engine.scheduler.step.weights.leaves == ARRAYS


def test_only_digests_of_published_weights_are_compared(engine):
    """That of a Hugging Face folder is of sizes and times."""
    engine.serve("v1", "same")
    engine.stage("v2", "same", kind="hf")
    assert engine.n_loaded == 2
