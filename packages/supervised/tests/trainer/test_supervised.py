"""Runs of supervised training: losses against float64 numpy, and that a run goes on bit by bit after a crash."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson
import pytest

from services.trainer.batches.batch import BatchLayout
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.learner.optimizer import OptimizerOptions
from services.trainer.learner.scoring import objective, params_of
from services.trainer.metrics import prometheus
from services.trainer.models.arrays import CheckpointContents, RestoredCheckpoint
from services.trainer.models.initial_weights import leaves_of
from services.trainer.models.lora import LoraOptions
from services.trainer.models.options import ModelOptions
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from shared.errors import ConfigError, Fenced, StorageFull
from shared.models.adapter import is_adapter, is_b
from shared.models.config import ModelConfig
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.process.telemetry import REGISTRY
from shared.run.archive import Archive
from shared.run.state import TrainerState
from shared.types import WeightVersion
from tests.support import decoder_reference, models
from tests.support.sinks import KeepingSink, raising
from tests.trainer.support import CONFIG, model_of
from tools.simulated.trainer import NumpyArrays
from volley_supervised.conversations.data import RunData
from volley_supervised.conversations.dataset import Dataset, Example, TokenSequence
from volley_supervised.learner.dpo import pair_terms, weighted_likelihood
from volley_supervised.learner.objectives import Imitation, Preferences, UpdateOptions
from volley_supervised.learner.steps import SupervisedOptions
from volley_supervised.metrics import SupervisedMetrics
from volley_supervised.trainer.backend import SupervisedBackend
from volley_supervised.trainer.loop import SupervisedPlan
from volley_supervised.trainer.worker import SupervisedParts, SupervisedWorker

SMALL = CONFIG | {"num_hidden_layers": 1}
WEIGHTS, START = models.random_weights(SMALL, 1), models.random_weights(SMALL, 2)
LAYOUT = BatchLayout((16,), 2, 0)
OPTIMIZER = OptimizerOptions(1e-3, "cosine", 1, 0, 0.9, 0.95, 0.0, 1.0)
BETA = 0.5
LORA = LoraOptions(2, 4.0, ("q_proj", "down_proj"))


def sequence(rng: np.random.Generator) -> TokenSequence:
    n = int(rng.integers(6, 17))
    mask = (np.arange(n) >= 4).astype(np.uint8)
    mask[-1] = rng.integers(2)
    return TokenSequence(rng.integers(1, SMALL["vocab_size"], n).astype(np.int32), mask)


def examples(n: int, width: int = 1, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [tuple(sequence(rng) for _ in range(width)) for _ in range(n)]


def logprob(weights: models.Weights, one: TokenSequence) -> float:
    """Of the tokens to learn, in float64."""
    table = decoder_reference.log_softmax(decoder_reference.logits(weights, SMALL, one.ids), 1.0)
    return float((table[np.arange(len(one.ids) - 1), one.ids[1:]] * one.mask[1:]).sum())


def dpo_loss(weights: models.Weights, pairs: Sequence[Example]) -> float:
    """Equation 7 of the paper, word for word."""
    losses = []
    for chosen, rejected in pairs:
        of_chosen = np.log(np.exp(logprob(weights, chosen)) / np.exp(logprob(START, chosen)))
        of_rejected = np.log(np.exp(logprob(weights, rejected)) / np.exp(logprob(START, rejected)))
        losses.append(-np.log(1 / (1 + np.exp(-(BETA * of_chosen - BETA * of_rejected)))))
    return float(np.mean(losses))


def test_the_held_out_loss_is_the_mean_over_all_learned_tokens():
    held_out = examples(5)
    found = Imitation(model_of(WEIGHTS, SMALL), UpdateOptions(2, LAYOUT, OPTIMIZER)).evaluate(held_out)
    tokens = sum(one.n_learned for (one,) in held_out)
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(-sum(logprob(WEIGHTS, one) for (one,) in held_out) / tokens, rel=1e-5)


def test_loss_and_gradient_of_preferences_are_those_of_the_paper():
    """Three pairs over three micro-batches, so that the answers of one pair stand in different ones."""
    pairs, model = examples(3, width=2, seed=3), model_of(WEIGHTS, SMALL)
    start = {name: np.asarray(value) for name, value in params_of(model_of(START, SMALL)).items()}
    preferences = Preferences(model, UpdateOptions(6, LAYOUT, OPTIMIZER), BETA, start)
    terms, batches = preferences.weighted(pairs)
    assert len(batches) == 3
    assert terms.to_metrics()["loss"] == pytest.approx(dpo_loss(WEIGHTS, pairs), rel=1e-5)
    of_batch = jax.jit(jax.grad(objective(model, weighted_likelihood, 1.0, "none"), has_aux=True))
    gradients = [of_batch(preferences.learner.params, batch)[0] for batch in batches]
    for leaf, name in (("final_norm.w", "model.norm.weight"), ("layers.0.input_layernorm.w", LAYER_NORM)):
        ours = np.sum([np.asarray(gradient[leaf], np.float64) for gradient in gradients], axis=0)
        theirs = np.array([slope(name, i, pairs) for i in range(0, len(ours), 8)])
        np.testing.assert_allclose(ours[::8], theirs, rtol=2e-3, atol=2e-5)


LAYER_NORM = "model.layers.0.input_layernorm.weight"


def slope(name: str, i: int, pairs: Sequence[Example], h: float = 1e-5) -> float:
    values = []
    for sign in (1, -1):
        moved = WEIGHTS[name].astype(np.float64)
        moved[i] += sign * h
        values.append(dpo_loss({**WEIGHTS, name: moved}, pairs))
    return (values[0] - values[1]) / (2 * h)


@pytest.mark.parametrize("far", [0.0, 30.0, 1e4, -1e4])
def test_pairs_however_far_apart_have_a_finite_loss(far: float):
    policy, reference = np.array([[far, -far]]), np.zeros((1, 2))
    found, weights = pair_terms(policy, reference, 1.0), pair_terms(policy, reference, 1.0).weights(1.0)
    assert np.isfinite(weights).all()
    assert found.to_metrics()["loss"] == pytest.approx(max(0.0, -2 * far), abs=0.7)
    assert found.to_metrics()["rewards/accuracies"] == (0.5 if far == 0 else float(far > 0))
    assert weights[0, 0] == -weights[0, 1] == pytest.approx(1 / (1 + np.exp(min(700.0, 2 * far))))


class Counting:
    """A backend whose only weight counts its steps: for what the worker does, whatever is trained."""

    def __init__(self, checkpoints: CheckpointFolders, last: int, at: Callable[[int], None]) -> None:
        self._checkpoints, self._last, self._at = checkpoints, last, at
        self._restored: RestoredCheckpoint | None = None
        self.count = 0

    def restore(self) -> TrainerState | None:
        self._restored = self._checkpoints.newest()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        self.count = int(self._restored.params["count"]) if self._restored else 0

    def open(self, examples: Sequence[Example]) -> int:
        return self._last

    def step(self) -> SupervisedMetrics:
        self._at(self.count + 1)
        self.count += 1
        return SupervisedMetrics(self.count, self._last, 1.0 / self.count, 1.0, 3)

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        return {"loss": 2.0}

    def relabel(self, state: TrainerState) -> Path:
        assert self._restored is not None
        return self._checkpoints.relabel(self._restored, state)

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        params = {"count": np.array(self.count, np.float32)}
        return self._checkpoints.save(state, CheckpointContents(params, {}, None, {}, None), base)


class Run:
    """A supervised run of seven steps in a folder; `at` is called before each."""

    def __init__(
        self,
        folder: Path,
        *,
        model: bool = False,
        beta: float | None = None,
        n: int = 7,
        lora: LoraOptions | None = None,
        **plan: Any,
    ) -> None:
        self.folder, self.status, self.lora = folder, TrainerStatus("r", 0), lora
        self.model, self.beta, self.learning_rate = model, beta, 1e-3
        self.data = RunData(Dataset(examples(n, 2 if beta else 1)), examples(3, 2 if beta else 1, seed=9))
        self.plan = replace(SupervisedPlan(0, 2, 2, 3, 5.0, beta is not None), **plan)
        self.at: Callable[[int], None] = lambda step: None
        self.sinks = MetricsFanout()

    def checkpoints(self) -> CheckpointFolders:
        return CheckpointFolders(self.folder / "checkpoints", "r", 9, OrbaxArrays() if self.model else NumpyArrays())

    def backend(self) -> tuple[Any, CheckpointFolders]:
        checkpoints = self.checkpoints()
        if not self.model:
            return Counting(checkpoints, 7, self.at), checkpoints
        model = ModelOptions(
            self.folder, "float32", "none", (1, 1), ("fsdp", "tp"), 0, lora=self.lora, random_weights=True
        )
        optimizer = replace(OPTIMIZER, learning_rate=self.learning_rate)
        options = SupervisedOptions(0, 2, 2, 0, LAYOUT, optimizer, self.beta)
        backend = SupervisedBackend(model, ModelConfig.parse(SMALL), options, checkpoints)
        inner = backend.step

        def step() -> Any:
            self.at(self.status.step + 1)
            return inner()

        backend.step = step
        return backend, checkpoints

    async def run(self, until: Callable[[TrainerStatus], bool] = lambda status: status.phase == "done") -> None:
        async def data(_waiter: Any) -> RunData:
            return self.data

        with ThreadPoolExecutor(1) as thread:
            archive, log = Archive(self.folder / "archive", "r"), StepLog(self.folder / "sft.jsonl")
            parts = SupervisedParts(self.backend, archive, log, thread, data, self.sinks)
            work = asyncio.create_task(SupervisedWorker(self.plan, parts, self.status).run())
            while not work.done() and not until(self.status):
                await asyncio.sleep(0.01)
            work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                return

    def newest(self) -> RestoredCheckpoint:
        found = self.checkpoints().newest()
        assert found is not None
        return found

    def lines(self) -> list[dict[str, Any]]:
        """Without what no two runs have in common."""
        other = ("time", "step_s", "tokens_per_sec", "version")
        found = [orjson.loads(line) for line in (self.folder / "sft.jsonl").read_bytes().splitlines()]
        return [{key: value for key, value in one.items() if key not in other} for one in found]


def same(a: Run, b: Run) -> bool:
    one, other = a.newest(), b.newest()
    pairs = [(one.params, other.params), (one.optimizer, other.optimizer)]
    return all(x.keys() == y.keys() and all(_bits(x[k]) == _bits(y[k]) for k in x) for x, y in pairs)


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param({}, id="counted"),
        pytest.param({"model": True}, marks=pytest.mark.long, id="sft"),
        pytest.param({"model": True, "beta": BETA}, marks=pytest.mark.long, id="dpo"),
        pytest.param({"model": True, "lora": LORA}, marks=pytest.mark.long, id="sft-lora"),
        pytest.param({"model": True, "beta": BETA, "lora": LORA}, marks=pytest.mark.long, id="dpo-lora"),
    ],
)
async def test_what_a_crash_left_goes_on_bit_by_bit(tmp_path: Path, made: dict[str, Any]):
    """Every file as it was right before step 6: two steps after a checkpoint, with their lines written, the last one
    torn.
    """
    whole = Run(tmp_path / "whole", **made, save_interval_steps=3)

    def leave(step: int) -> None:
        if step == 6:
            shutil.copytree(tmp_path / "whole", tmp_path / "crashed")

    whole.at = leave
    await whole.run()
    with (tmp_path / "crashed" / "sft.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')
    again = Run(tmp_path / "crashed", **made, save_interval_steps=3)
    await again.run()
    assert whole.newest().state.version.step == 7
    assert again.newest().state.lineage == ((1, 0), (2, 3))
    assert same(whole, again)
    assert whole.lines() == again.lines()
    assert [one["step"] for one in again.lines()] == [*range(8)]
    assert [one["step"] for one in again.lines() if "eval_loss" in one] == [0, 3, 6, 7]
    assert again.newest().state.data == {"digest": whole.data.digest, "examples": 7, "epoch": 2, "offset": 0}
    assert whole.newest().state.data == again.newest().state.data


@pytest.mark.parametrize("beta", [None, pytest.param(BETA, marks=pytest.mark.long)])
async def test_adapters_alone_are_trained_and_their_base_is_kept_once(tmp_path: Path, beta: float | None):
    """The loss falls; before the first update the policy is its own reference."""
    run = Run(tmp_path, model=True, beta=beta, lora=LORA, save_interval_steps=3)
    run.learning_rate, known = 3e-2, examples(7, 2 if beta else 1)
    run.data = RunData(Dataset(known), known)
    await run.run()
    found = run.newest()
    assert found.adapter is not None
    assert found.adapter.scale == LORA.scale
    assert all(map(is_adapter, found.params))
    assert all(np.any(value) for name, value in found.params.items() if is_b(name))
    bases = list((tmp_path / "checkpoints" / "base").iterdir())
    assert [base.name for base in bases] == [found.adapter.base.digest]
    base = run.checkpoints().base_of(found)
    start = leaves_of(tmp_path, ModelConfig.parse(SMALL), 0, random=True)
    assert base
    assert all(np.array_equal(value, np.asarray(start(name, value.shape))) for name, value in base.items())
    lines = run.lines()
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"]
    if beta is not None:
        assert lines[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.long
async def test_numbers_that_are_not_finite_stop_the_run_and_are_not_saved(tmp_path: Path):
    run = Run(tmp_path, model=True)
    run.learning_rate = 1e38
    await run.run(until=lambda status: status.refused is not None)
    assert "not finite" in (run.status.refused or "")
    assert run.newest().state.step == 0


async def test_a_stop_saves_what_is_trained_and_a_finished_run_trains_no_more(tmp_path: Path):
    run = Run(tmp_path, save_interval_steps=100)
    run.at = lambda step: run.status.stop() if step == 3 else None
    await run.run(until=lambda status: status.phase == "stopped")
    assert (run.newest().state.step, run.newest().state.phase) == (3, "rl")
    await Run(tmp_path).run()
    assert (run.newest().state.step, run.newest().state.phase, run.newest().params["count"]) == (7, "done", 7)
    again = Run(tmp_path)
    again.at = lambda step: pytest.fail(f"step {step} was made again")
    await again.run()
    assert run.newest().state.lineage == ((1, 0), (2, 3), (3, 7))
    assert [one["step"] for one in run.lines()] == [*range(8)]


async def test_sinks_get_the_lines_of_the_file_and_stop_nothing(tmp_path: Path):
    run, kept = Run(tmp_path), KeepingSink()
    bad = [KeepingSink("bad", raising(OSError("away"))), PrometheusSink(prometheus.show)]
    with MetricsFanout.opened([*bad, kept]) as run.sinks:
        await run.run()
    lines = [orjson.loads(line) for line in (tmp_path / "sft.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert kept.lines == [("supervised", line) for line in lines]
    assert REGISTRY.get_sample_value("volley_trainer_step") == 7
    assert REGISTRY.get_sample_value("volley_trainer_loss") == lines[-1]["loss"]


async def test_other_data_are_refused(tmp_path: Path):
    await Run(tmp_path).run()
    with pytest.raises(ConfigError, match="not those that the run was begun with"):
        await Run(tmp_path, n=8).run()


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ({"/a": "1" * 64}, {"/a": "2" * 64}, "/a has changed: its digest is 2222222222222222, it was 1111111111111111"),
        ({"/a": "1" * 64}, {"/b": "2" * 64}, r"/a \(1{16}\) is missing, /b \(2{16}\) is new"),
        ({"/a": "1" * 64}, {"/a": "1" * 64, "/b": "2" * 64}, r": /b \(2{16}\) is new"),
        ({"/a": "1" * 64}, {"/moved": "1" * 64}, "the files are the same"),
        ({}, {"/a": "1" * 64}, "other files, tokenizer or chat template"),
    ],
)
async def test_a_file_that_changed_is_named_with_both_digests(tmp_path: Path, was: Any, now: Any, why: str):
    first, second = Run(tmp_path), Run(tmp_path, n=8)
    first.data, second.data = replace(first.data, files=was), replace(second.data, files=now)
    await first.run()
    assert (first.newest().state.data or {}).get("files", {}) == was
    with pytest.raises(ConfigError, match=why):
        await second.run()


async def test_files_that_moved_are_the_same_data(tmp_path: Path):
    first, second = Run(tmp_path), Run(tmp_path)
    first.data, second.data = replace(first.data, files={"/a": "1"}), replace(second.data, files={"/b": "1"})
    await first.run()
    await second.run()


async def test_a_pause_holds_the_next_step_and_a_wish_for_a_checkpoint_is_met(tmp_path: Path):
    run = Run(tmp_path, save_interval_steps=100)
    run.at = lambda step: run.status.ask(pause=True, checkpoint=True) if step == 2 else None
    await run.run(until=lambda status: status.phase == "paused")
    assert run.newest().state.step == run.status.durable_step == 2


async def test_a_checkpoint_that_is_asked_for_during_a_pause_is_made_then(tmp_path: Path):
    run = Run(tmp_path, save_interval_steps=100)
    run.at = lambda step: run.status.ask(pause=True) if step == 2 else None

    def until(status: TrainerStatus) -> bool:
        if status.phase == "paused" and status.durable_step == 0:
            status.ask(checkpoint=True)
        return status.phase == "paused" and status.durable_step == 2

    await asyncio.wait_for(run.run(until=until), 30)
    assert run.newest().state.step == 2


async def test_a_trainer_that_began_later_shuts_the_first_one_out(tmp_path: Path):
    run = Run(tmp_path)
    run.at = lambda step: Archive(tmp_path / "archive", "r").claim(7) if step == 3 else None
    with pytest.raises(Fenced):
        await run.run()
    assert run.newest().state.step == 2


async def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, waits = Run(tmp_path), list[str | None]()
    inner = CheckpointFolders.save

    def save(self: CheckpointFolders, *arguments: Any) -> Path:
        waits.append(run.status.waiting_for)
        if len(waits) == 2:
            raise StorageFull("no space left on disk")
        return inner(self, *arguments)

    monkeypatch.setattr(CheckpointFolders, "save", save)
    await run.run()
    assert waits[:3] == [None, None, "no space left on disk"]
    assert run.newest().state.step == 7


def test_preferences_are_learned_alike_with_the_reference_in_the_hosts_memory() -> None:
    pairs, results = examples(3, width=2, seed=3), []
    for offload in (False, True):
        model = model_of(WEIGHTS, SMALL)
        options = UpdateOptions(6, LAYOUT, OPTIMIZER)
        preferences = Preferences(model, options, 0.1, None, offload=offload)
        results.append([preferences.update(pairs), preferences.update(pairs), preferences.evaluate(pairs)])
    assert results[0] == results[1]
