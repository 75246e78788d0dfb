"""The warm start on demonstrations: which of them, which tokens, and that it learns them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.optimizer import OptimizerOptions
from services.trainer.learner.scoring import params_of
from services.trainer.settings import TokenLimits
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.waiter import Waiter
from shared.clients.env import DemonstrationReply
from shared.config import load as load_config
from shared.errors import (
    ConfigError,
    GivenUp,
    MalformedAnswer,
    NonFinite,
    NotFound,
    RateLimited,
    ServiceUnreachable,
    TooLarge,
    VolleyError,
)
from shared.models.chat import ChatTokenizer
from shared.process.sinks import MetricsFanout
from tests.support import models
from tests.trainer.support import CONFIG, model_of
from volley_supervised.conversations.data import DataSettings, RetryingDemonstrator, load
from volley_supervised.conversations.dataset import Example, digest, tokenized
from volley_supervised.conversations.demonstrations import as_records, fetch
from volley_supervised.learner import steps
from volley_supervised.learner.steps import SupervisedOptions
from volley_supervised.metrics import SupervisedMetrics
from volley_supervised.options import supervised_options
from volley_supervised.trainer.warm_start import ExampleSteps, WarmStart, received

ROOT = Path(__file__).parents[4]
TOKENIZER = ChatTokenizer(ROOT / "configs/models/tiny")
TALK = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "Right"}, {"role": "user", "content": "ok"}]
TALK = [*TALK, {"role": "assistant", "content": "Up"}]
OPTIMIZER = OptimizerOptions(1e-2, "constant", 0, 12, 0.9, 0.95, 0.0, 1.0)


def sequences(tokenizer: ChatTokenizer, shown: list[DemonstrationReply], longest: int) -> list[Example]:
    return list(tokenized(tokenizer, as_records("lake", shown), "conversations", longest, "drop").examples)


class Env:
    def __init__(self, n_tasks: int) -> None:
        self.n_tasks, self.asked = n_tasks, []

    async def num_tasks(self, env: str, split: str) -> int:
        assert (env, split) == ("lake", "train")
        return self.n_tasks

    async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]:
        self.asked += indices
        said = {"role": "assistant", "content": "ok"}
        return [DemonstrationReply([{"role": "user", "content": str(index)}, said]) for index in indices]


@pytest.mark.parametrize("n_tasks", [5, 10**9])
async def test_distinct_training_tasks_chosen_by_the_seed(n_tasks: int):
    first, second, other = [await fetch(Env(n_tasks), "lake", 20, seed) for seed in (1, 1, 2)]
    contents = [shown.messages[0]["content"] for shown in first]
    assert first == second != other
    assert len(contents) == len(set(contents)) == min(20, n_tasks)


async def test_an_environment_that_goes_away_meanwhile_is_one_error():
    class Leaving(Env):
        async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]:
            raise ServiceUnreachable("env did not answer")

    with pytest.raises(ServiceUnreachable):
        await fetch(Leaving(9), "lake", 5, 0)


class Single(Env):
    """Shows demonstrations together only as long as `failures` has no error for it."""

    def __init__(self, *failures: VolleyError | None) -> None:
        super().__init__(40)
        self.failures, self.batches, self.present, self.most = list(failures), 0, 0, 0

    async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]:
        self.batches += 1
        if (error := self.failures.pop(0)) is not None:
            raise error
        return await super().demonstrations(env, split, indices)

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply:
        self.present += 1
        self.most = max(self.most, self.present)
        await asyncio.sleep(0)
        self.present -= 1
        return (await Env.demonstrations(self, env, split, [index]))[0]


async def shown_by(client: Env) -> list[DemonstrationReply]:
    with ThreadPoolExecutor(1) as thread:
        return await fetch(RetryingDemonstrator(client, Waiter(thread, TrainerStatus("r", 0))), "lake", 40, 0)


@pytest.mark.parametrize(
    "error", [NotFound("no such route"), MalformedAnswer("too long"), TooLarge("too large"), GivenUp("too slow")]
)
async def test_what_cannot_be_shown_together_is_asked_for_alone_and_at_once(error: VolleyError):
    client = Single(error, error, error)
    assert await shown_by(client) == await shown_by(Env(40))
    assert client.batches <= 2  # those under way when the first failed
    assert client.most == 32
    assert len(client.asked) == 40


async def test_a_busy_service_is_asked_for_many_again():
    client = Single(None, RateLimited("more layouts are drawn"), None)
    assert await shown_by(client) == await shown_by(Env(40))
    assert (client.batches, len(client.asked)) == (3, 40)


async def test_an_unknown_environment_is_an_error():
    class Unknown(Single):
        async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply:
            raise NotFound("no environment")

    with pytest.raises(NotFound, match="no environment"):
        await shown_by(Unknown(*[NotFound("no such route")] * 3))


async def test_demonstrations_and_the_file_that_is_made_of_them_are_the_same_data(tmp_path: Path):
    """As a warm start has them, as a run of SFT has them, asked for once, and as its file has them elsewhere."""
    settings = DataSettings((), (), 0.0, "conversations", 64, "drop", 3, "lake", 8)
    with ThreadPoolExecutor(1) as thread:
        waiter, kept, env = Waiter(thread, TrainerStatus("r", 0)), tmp_path / "kept.jsonl", Env(20)
        warm = await load(settings, TOKENIZER, Env(20), waiter)
        alone = await load(settings, TOKENIZER, env, waiter, kept)
        again = await load(settings, TOKENIZER, None, waiter, kept)
        elsewhere = await load(replace(settings, train=(kept,)), TOKENIZER, None, waiter)
        held_out = await load(replace(settings, train=(kept,), held_out=(kept,)), TOKENIZER, None, waiter)
    assert len(env.asked) == len(warm.train.examples) == 8
    assert warm.digest == alone.digest == again.digest == elsewhere.digest != held_out.digest
    assert len(held_out.held_out) == 8


def test_what_the_assistant_says_and_its_end_are_trained():
    ((row,),) = sequences(TOKENIZER, [DemonstrationReply(TALK)], 128)
    said = TOKENIZER.decode([int(t) for t, m in zip(row.ids, row.mask, strict=True) if m])
    assert said == "Right<|im_end|>Up<|im_end|>"
    assert row.n_learned == int(row.mask.sum())


def test_demonstrations_are_rendered_with_the_tools_that_a_rollout_is_rendered_with(tmp_path: Path):
    folder = shutil.copytree(ROOT / "configs/models/tiny", tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    told = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    settings["chat_template"] = told + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = ChatTokenizer(folder)
    tool = {"type": "function", "function": {"name": "calculator", "description": "exact", "parameters": {}}}
    ((row,),) = sequences(tokenizer, [DemonstrationReply(TALK[:2], [tool])], 400)
    prompt = tokenizer.render_prompt(TALK[:1], [tool])
    assert "calculator" in tokenizer.decode(prompt)
    assert list(row.ids[: len(prompt)]) == prompt
    assert not row.mask[: len(prompt)].any()


def test_demonstrations_that_do_not_fit_are_left_out():
    long = DemonstrationReply([{"role": "user", "content": "go " * 200}, {"role": "assistant", "content": "Up"}])
    assert len(sequences(TOKENIZER, [DemonstrationReply(TALK), long], 128)) == 1
    with pytest.raises(ConfigError, match="fits into 128 tokens"):
        sequences(TOKENIZER, [long], 128)


def test_it_learns_and_is_deterministic():
    config = CONFIG | {"vocab_size": 512, "num_hidden_layers": 1}
    rows = sequences(TOKENIZER, [DemonstrationReply(TALK), DemonstrationReply(TALK[:2])], 64)
    options = SupervisedOptions(12, None, 4, 0, BatchLayout((64,), 2, TOKENIZER.pad_id), OPTIMIZER)
    runs = []
    for _ in range(2):
        model = model_of(models.random_weights(config, 0), config)
        before = {name: np.asarray(value) for name, value in params_of(model).items()}
        runs.append([m.loss for m in steps.warm_start(model, rows, options)])
        trained = params_of(model)
        assert not np.array_equal(trained["final_norm.w"], before["final_norm.w"])
    assert runs[0] == runs[1]
    assert runs[0][-1] < 0.5 * runs[0][0]


def test_another_process_trains_on_the_same_examples():
    config = load_config([ROOT / "configs/quickstart.yaml"], ["sft.batch_size=4"]).config
    rows, tokens = (
        sequences(TOKENIZER, [DemonstrationReply(TALK), DemonstrationReply(TALK[:2])], 64),
        TokenLimits(512, 0),
    )
    options = supervised_options(config, tokens)
    theirs = received(config, tokens, ExampleSteps(rows, options).to_wire())
    assert theirs.options == options
    assert digest([theirs.examples]) == digest([rows])


class Steps:
    """Steps of a backend; `at` is called before each."""

    def __init__(self, n: int, at: Callable[[int], object] = lambda step: None) -> None:
        self.n, self.at = n, at

    def warm_start(self, _steps: ExampleSteps) -> Iterator[SupervisedMetrics]:
        for step in range(1, self.n + 1):
            self.at(step)
            yield SupervisedMetrics(step, self.n, 1.0 / step, 0.5, 8)


async def logged_steps(tmp_path: Path, backend: Steps, status: TrainerStatus) -> list[int]:
    settings = DataSettings((), (), 0.0, "conversations", 64, "drop", 3, "lake", 8)
    options = SupervisedOptions(backend.n, None, 4, 0, BatchLayout((64,), 2, TOKENIZER.pad_id), OPTIMIZER)
    start = WarmStart(settings, options, Env(20), TOKENIZER, StepLog(tmp_path / "sft.jsonl"), MetricsFanout())
    with ThreadPoolExecutor(1) as thread, contextlib.suppress(NonFinite):
        await start(backend, status, thread)
    return [json.loads(line)["step"] for line in (tmp_path / "sft.jsonl").read_text(encoding="utf-8").splitlines()]


async def test_every_step_is_logged_once(tmp_path: Path):
    assert await logged_steps(tmp_path, Steps(500), TrainerStatus("r", 0)) == [*range(1, 501)]


async def test_the_steps_before_one_that_fails_are_logged(tmp_path: Path):
    def fail(step: int) -> None:
        if step == 4:
            raise NonFinite("loss is not finite", "", ["loss"])

    assert await logged_steps(tmp_path, Steps(9, fail), TrainerStatus("r", 0)) == [1, 2, 3]


async def test_a_stop_ends_the_warm_start_after_the_running_step(tmp_path: Path):
    status = TrainerStatus("r", 0)
    steps = Steps(10**9, lambda step: status.stop() if step == 7 else None)
    assert await logged_steps(tmp_path, steps, status) == [*range(1, 8)]
