"""Futures: recorded once, executed in order, settled once, the same bits after a restart, and checked offline."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file

from packages.tinker.tests.trainer.support import SHAPES, base, service
from shared.errors import ConfigError, InputError, NotFound, WeightsError
from shared.models.adapter import is_b
from shared.models.weight_files import SCALE, UNMERGED, WEIGHTS
from volley_tinker import futures
from volley_tinker.server.engine import lora_of
from volley_tinker.server.entries import JSON, Future, Request
from volley_tinker.server.learner import Base, ClientModel, saved_params
from volley_tinker.server.messages import pass_output
from volley_tinker.server.service import TinkerService, json_request
from volley_tinker.server.specs import ALPHA, ModelSpec
from volley_tinker.server.store import FutureStore


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return base(tmp_path_factory.mktemp("tinker"))


PEFT_FILES = ["adapter_config.json", "adapter_model.safetensors"]


def pass_request(
    model: str, seq: int, seed: int, kind: str = "forward_backward", loss: str = "cross_entropy"
) -> Request:
    ids = np.random.default_rng(seed).integers(0, 64, 9).tolist()
    datum = {"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": {"target_tokens": {"data": ids[1:]}}}
    body = {"model_id": model, "seq_id": seq, "forward_backward_input": {"data": [datum], "loss_fn": loss}}
    data = orjson.dumps(body)
    return Request(model, seq, kind, data, JSON, f"{seed} {kind}")


def step(model: str, seq: int, **adam: float) -> Request:
    return json_request(model, seq, "optim_step", {"adam_params": {"learning_rate": 0.01, **adam}})


async def new_model(tinker: TinkerService, rank: int = 4) -> str:
    session = await tinker.create_session({})
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank, "seed": 1}}
    future = await tinker.create_model(body)
    return orjson.loads(future.result or b"")["model_id"]


async def results(tinker: TinkerService, sent: list[Request]) -> list[Future]:
    """Send the requests, and wait for their results while the worker runs."""
    worker = asyncio.ensure_future(tinker.run())
    try:
        found = [await tinker.submit(one) for one in sent]
        async with asyncio.timeout(60):
            return [await tinker.wait(one.id, 60) for one in found]
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


def weights(folder: Path, model: str) -> list[str]:
    connection = futures.connect(folder / futures.DATABASE, read_only=True)
    try:
        rows = connection.execute("SELECT weights FROM ledger WHERE owner = ? AND weights != '' ORDER BY seq", (model,))
        return [one for (one,) in rows]
    finally:
        connection.close()


def plan(model: str) -> list[Request]:
    made = [pass_request(model, 1, 1), pass_request(model, 2, 2), step(model, 3), pass_request(model, 4, 3)]
    return [*made, step(model, 5), pass_request(model, 6, 4), step(model, 7)]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 4])
async def test_a_restart_between_pass_and_step_changes_no_bit(tmp_path: Path, tiny: Base, rank: int):
    """Also when saved states are older than the last step."""
    checksums = []
    for parts in ([7], [2, 3, 4, 5], [1, 2, 4, 7]):
        folder, done, model = tmp_path / str(parts), 0, ""
        for end in [*parts, 7]:
            async with service(folder, tiny) as tinker:
                model = model or await new_model(tinker, rank)
                if len(parts) > 3:
                    tinker.saves_state = lambda _model: False  # type: ignore[method-assign]
                await results(tinker, plan(model)[done:end])
            done = end
        assert not [*futures.problems(folder)]
        checksums.append(weights(folder, model))
    assert checksums[0] == checksums[1] == checksums[2]
    assert len(set(checksums[0])) == 3


async def test_requests_are_executed_once_and_in_order(tmp_path: Path, tiny: Base):
    """Numbers that arrive early wait; a repeated request has the recorded result; another one is refused."""
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        sent = plan(model)
        found = await results(tinker, [sent[2], sent[1], sent[0], sent[0]])
        assert [one.outcome for one in found] == ["done"] * 4
        assert pass_output(found[2].result or b"").metrics == pass_output(found[3].result or b"").metrics
        again = await tinker.submit(sent[2])
        assert again.result == found[0].result
        with pytest.raises(InputError):
            await tinker.submit(step(model, 3, learning_rate=9.0))
        with pytest.raises(NotFound):
            await tinker.submit(step("other:train:0", 1))
    assert len(weights(tmp_path, model)) == 1
    assert not [*futures.problems(tmp_path)]


async def test_a_wrong_request_takes_its_number(tmp_path: Path, tiny: Base):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        wrong = [pass_request(model, 1, 1, loss="gspo"), step(model, 2, beta1=2.0), step(model, 3, what=1.0)]
        found = await results(tinker, [*wrong, pass_request(model, 4, 1), step(model, 5)])
        assert [one.outcome for one in found] == ["failed"] * 3 + ["done"] * 2
        assert {orjson.loads(one.result or b"")["category"] for one in found[:3]} == {"user"}


async def test_saved_weights_are_loaded(tmp_path: Path, tiny: Base):
    """Into a new model with its optimizer, and into one of another rank not at all."""
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        saved = json_request(model, 3, "save_weights", {"path": "a"})
        twice = json_request(model, 4, "save_weights", {"path": "a"})
        found = await results(tinker, [pass_request(model, 1, 1), step(model, 2), saved, twice])
        path = orjson.loads(found[2].result or b"")["path"]
        assert (path, found[3].outcome) == (f"tinker://{model}/weights/a", "failed")
        session = model.partition(":")[0]
        loads = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        created = await tinker.create_model_from(loads)
        rest = [pass_request(created.owner, 1, 5), step(created.owner, 2)]
        own = [pass_request(model, 5, 5), step(model, 6)]
        await results(tinker, [*rest, *own])
        other = await new_model(tinker, rank=2)
        (refused,) = await results(tinker, [json_request(other, 1, "load_weights", {"path": path, "optimizer": False})])
        assert refused.outcome == "failed"
    assert weights(tmp_path, created.owner)[-1] == weights(tmp_path, model)[-1]
    assert not [*futures.problems(tmp_path)]


@pytest.mark.parametrize(("rank", "files"), [(4, PEFT_FILES), (0, ["config.json", "model.safetensors"])])
async def test_weights_are_exported_for_download(tmp_path: Path, tiny: Base, rank: int, files: list[str]):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker, rank)
        (saved,) = await results(tinker, [json_request(model, 1, "save_weights_external", {"path": "out"})])
        answer = orjson.loads(saved.result or b"")
        assert answer["path"] == f"tinker://{model}/external_weights/out"
        found = tinker.store.folder / (await tinker.db(tinker.store.checkpoint, answer["path"])).file
        assert sorted(one.name for one in found.parent.iterdir()) == files
        assert found.stat().st_size == answer["size_bytes"]
        session = model.partition(":")[0]
        with pytest.raises(InputError):
            await tinker.create_sampler(
                {"session_id": session, "sampling_session_seq_id": 0, "model_path": answer["path"]}
            )
        with pytest.raises(InputError):
            await tinker.create_model_from({"session_id": session, "model_seq_id": 1, "path": answer["path"]})


async def test_a_folder_has_one_server_which_removes_what_was_not_recorded(tmp_path: Path, tiny: Base):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        await results(tinker, plan(model)[:4])
        with pytest.raises(ConfigError):
            FutureStore(tmp_path)
    kept = sorted((tmp_path / "states").iterdir())
    (tmp_path / "states" / ".x.safetensors.tmp").write_bytes(b"half")
    async with service(tmp_path, tiny):
        assert sorted((tmp_path / "states").iterdir()) == kept
    assert len(kept) == 1


async def test_a_failed_step_clears_the_gradient_also_after_a_restart(tmp_path: Path, tiny: Base):
    checksums = []
    for name, ends in (("one", [4]), ("two", [3, 4])):
        folder, model, done = tmp_path / name, "", 0
        for end in ends:
            async with service(folder, tiny) as tinker:
                tinker.saves_state = lambda _model: False  # type: ignore[method-assign]
                model = model or await new_model(tinker)
                sent = [pass_request(model, 1, 1), step(model, 2, beta1=2.0), pass_request(model, 3, 2), step(model, 4)]
                found = await results(tinker, sent[done:end])
            done = end
        assert found[-1].outcome == "done"
        checksums.append(weights(folder, model))
    assert checksums[0] == checksums[1]


def too_large(model: str, seq: int, advantage: float) -> Request:
    """Return a pass whose gradient grows with the advantage, up to one that is not finite."""
    n = 8
    inputs = {
        "target_tokens": {"data": [3] * n},
        "logprobs": {"data": [-3.0] * n},
        "advantages": {"data": [advantage] * n},
    }
    datum = {"model_input": {"chunks": [{"tokens": [5] * n}]}, "loss_fn_inputs": inputs}
    given = {"data": [datum], "loss_fn": "importance_sampling"}
    return json_request(model, seq, "forward_backward", {"model_id": model, "seq_id": seq, "forward_input": given})


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(tmp_path: Path, tiny: Base, rank: int):
    """Not weights, optimizer state or the accumulated gradient; steps after it give the same bits as without it."""
    checksums = []
    for name, wrong in (("calm", False), ("wrong", True)):
        folder = tmp_path / name
        async with service(folder, tiny) as tinker:
            model = await new_model(tinker, rank)
            sent = [
                pass_request(model, 1, 1),
                step(model, 2, **({"eps": 0.0} if wrong else {"beta1": 2.0})),  # 0 / 0 where the gradient is 0
                pass_request(model, 3, 2),
                step(model, 4),
                too_large(model, 5, 1e38 if wrong else 1.0),
                step(model, 6, **({} if wrong else {"beta1": 2.0})),
                pass_request(model, 7, 3),
                step(model, 8),
            ]
            found = await results(tinker, sent)
            outcomes = [one.outcome for one in found]
        assert outcomes == ["done", "failed", "done", "done", "done", "failed", "done", "done"]
        checksums.append(weights(folder, model))
        assert not [*futures.problems(folder)]
    assert checksums[0] == checksums[1]


async def test_no_request_ends_the_server(tmp_path: Path, tiny: Base):
    """Not one that its checks let through, nor a checkpoint without its file; the model goes on from its past."""
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        saved = json_request(model, 1, "save_weights", {"path": "a"})
        (answer,) = await results(tinker, [saved])
        found = await tinker.db(tinker.store.checkpoint, orjson.loads(answer.result or b"")["path"])
        (tmp_path / found.file).unlink()
        defect = Request(model, 4, "forward_backward", b"7", JSON, "x")
        wrong = [
            json_request(model, 2, "optim_step", {"adam_params": None, "optimizer_params": None}),
            json_request(model, 3, "load_weights", {"path": found.path, "optimizer": True}),
            defect,
        ]
        made = await results(tinker, [*wrong, pass_request(model, 5, 1), step(model, 6)])
        assert [one.outcome for one in made] == ["failed"] * 3 + ["done"] * 2
        assert tinker.engine is not None
        with pytest.raises(WeightsError):
            tinker.engine.export(found, "t-1")
    assert len(weights(tmp_path, model)) == 1


async def test_adapters_are_exported_beside_their_base(tmp_path: Path):
    """Merged in bfloat16, a small change would be rounded away."""
    model = base(tmp_path, "bfloat16")
    async with service(tmp_path, model) as tinker:
        name = await new_model(tinker)
        sent = [pass_request(name, 1, 1), step(name, 2), json_request(name, 3, "save_weights_for_sampler", {})]
        found = orjson.loads((await results(tinker, sent))[2].result or b"")
        assert tinker.engine is not None
        saved = await tinker.db(tinker.store.checkpoint, found["path"])
        folders = [tinker.engine.export(*one) for one in ((saved, "t-1"), (None, "base"))]
        params = saved_params(load_file(tmp_path / saved.file))
    given = load_file(tmp_path / "model" / WEIGHTS)
    for folder in folders:
        written = load_file(folder / WEIGHTS)
        assert written.keys() == given.keys()
        for tensor, value in written.items():
            np.testing.assert_array_equal(value, given[tensor].astype(ml_dtypes.bfloat16))
    adapters = load_file(folders[0] / UNMERGED)
    assert (adapters.pop(SCALE), adapters.keys()) == (ALPHA / 4, params.keys())
    for one, value in adapters.items():
        np.testing.assert_array_equal(value, params[one])
    assert any(value.any() for one, value in adapters.items() if is_b(one))
    assert not (folders[1] / UNMERGED).exists()


async def test_a_model_whose_creation_was_not_settled_is_created_after_a_restart(tmp_path: Path, tiny: Base):
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"}
    async with service(tmp_path, tiny) as tinker:
        tinker.store.add_session("s", {})
        spec = ModelSpec("tiny", 4, 0).to_json()
        tinker.store.add_model("s:train:0", "s", spec, json_request("s:train:0", 0, "create_model", body))
    async with service(tmp_path, tiny) as tinker:
        await results(tinker, [pass_request("s:train:0", 1, 1)])
        future = await tinker.create_model(body)
    assert (future.outcome, orjson.loads(future.result or b"")["model_id"]) == ("done", "s:train:0")


async def test_a_finished_session_takes_no_new_request(tmp_path: Path, tiny: Base):
    """It may finish while a model is being made; repeated requests have their results."""
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        sent = [pass_request(model, 1, 1), step(model, 2)]
        worker = asyncio.ensure_future(tinker.run())
        try:
            for one in sent:
                await tinker.submit(one)
            await tinker.finish_session(model.partition(":")[0], "done")
            async with asyncio.timeout(60):
                assert (await tinker.wait(sent[1].id, 60)).outcome == "done"
            assert (await tinker.submit(sent[1])).outcome == "done"
            with pytest.raises(InputError):
                await tinker.submit(step(model, 3))
            assert not worker.done()
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def test_adapters_that_a_model_lacks_are_not_dropped(tiny: Base):
    whole = ClientModel(tiny, SHAPES, lora_of(ModelSpec("tiny", 4, 0)), 0)
    part = ClientModel(tiny, SHAPES, lora_of(ModelSpec("tiny", 4, 0, mlp=False)), 0)
    before = part.checksum()
    with pytest.raises(WeightsError):
        part.load(whole.state(), optimizer=True)
    assert part.checksum() == before


async def test_the_file_of_an_overwritten_checkpoint_is_removed(tmp_path: Path, tiny: Base):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        body = {"path": "a", "overwrite": True}
        await results(tinker, [json_request(model, seq, "save_weights", body) for seq in (1, 2)])
        files = tmp_path / "checkpoints"
        assert len([*files.iterdir()]) == 2
        await tinker.db(tinker.store.remove_unrecorded, 0.0)
        assert len([*files.iterdir()]) == 2
        await tinker.db(tinker.store.remove_unrecorded)
        assert len([*files.iterdir()]) == 1


async def test_a_sampling_session_keeps_its_weights(tmp_path: Path, tiny: Base):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        (saved,) = await results(tinker, [json_request(model, 1, "save_weights_for_sampler", {"path": "a"})])
        of_base = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 1, "base_model": "tiny"}
        opened = [await tinker.create_sampler(of_base) for _ in range(2)]
        assert opened[0] == opened[1]
        with pytest.raises(InputError):
            await tinker.create_sampler(of_base | {"model_path": orjson.loads(saved.result or b"")["path"]})


async def test_an_open_sampling_session_keeps_weights_that_are_overwritten(tmp_path: Path, tiny: Base):
    """Also their file, and after a restart; a session opened later has the new weights."""
    save = {"path": "a", "overwrite": True}
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        session = model.partition(":")[0]
        opens = {"session_id": session, "model_path": f"tinker://{model}/sampler_weights/a"}
        samplers, digests = list[str](), list[str]()
        for n in range(3):
            change = [pass_request(model, 3 * n + 1, n), step(model, 3 * n + 2)]
            saved = json_request(model, 3 * n + 3, "save_weights_for_sampler", save | {"sampling_session_seq_id": n})
            found = await results(tinker, [*change, saved])
            samplers.append(orjson.loads(found[-1].result or b"")["sampling_session_id"])
            digests.append((await tinker.db(tinker.store.checkpoint, opens["model_path"])).digest)
        assert await tinker.create_sampler(opens | {"sampling_session_seq_id": 0}) == samplers[0]
        samplers.append(await tinker.create_sampler(opens | {"sampling_session_seq_id": 3}))
    async with service(tmp_path, tiny) as tinker:
        for sampler, digest in zip(samplers, [*digests, digests[-1]], strict=True):
            weights = await tinker._weights_of({"sampling_session_id": sampler})
            assert weights is not None
            assert weights.digest == digest
    assert len(set(digests)) == len([*(tmp_path / "checkpoints").iterdir()]) == 3
    assert not [*futures.problems(tmp_path)]


async def test_replaced_weights_are_not_taken_for_those_of_a_longer_name(tmp_path: Path, tiny: Base):
    save = {"overwrite": True, "sampling_session_seq_id": 0}
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        requests = [
            json_request(model, 1, "save_weights_for_sampler", save | {"path": "a-b"}),
            json_request(model, 2, "save_weights_for_sampler", {"path": "a"}),
            pass_request(model, 3, 1),
            step(model, 4),
            json_request(model, 5, "save_weights_for_sampler", {"path": "a-b", "overwrite": True}),
        ]
        await results(tinker, requests)
        opens = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0}
        weights = f"tinker://{model}/sampler_weights/"
        await tinker.create_sampler(opens | {"model_path": f"{weights}a-b"})
        with pytest.raises(InputError):
            await tinker.create_sampler(opens | {"model_path": f"{weights}a"})


async def test_no_query_reads_the_whole_ledger(tmp_path: Path, tiny: Base):
    """Each request asks for a model's next number, and a ledger has a row for each sample of a server's life."""
    plans = list[str]()
    async with service(tmp_path, tiny) as tinker:
        connection = sqlite3.connect(tmp_path / futures.DATABASE)
        for query in (
            "SELECT coalesce(max(seq), -1) + 1 FROM ledger WHERE owner = 'm'",
            "SELECT future, weights FROM ledger WHERE owner = 'm' AND seq > 1 ORDER BY seq",
            "UPDATE futures SET result = NULL WHERE settled < 1 AND result IS NOT NULL",
        ):
            plans += [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
        connection.close()
        assert tinker.store.next_seq("m") == 0
    assert len(plans) >= 3
    assert not [one for one in plans if one.startswith("SCAN")]


LIES: list[Callable[[Any], Any]] = [
    lambda db: db.execute("DELETE FROM ledger WHERE n = 3"),
    lambda db: db.execute("UPDATE ledger SET weights = 'x' WHERE n = 4"),
    lambda db: db.execute("UPDATE futures SET result = 'x' WHERE seq = 1"),
    lambda db: db.execute("UPDATE futures SET outcome = 'failed' WHERE seq = 1"),
    lambda db: db.execute("UPDATE futures SET outcome = NULL WHERE seq = 2"),
    lambda db: db.execute("UPDATE models SET state_weights = 'x'"),
    lambda db: db.execute("DELETE FROM ledger WHERE n = (SELECT max(n) FROM ledger)"),
    lambda db: db.execute("UPDATE futures SET body = 'x' WHERE body IS NOT NULL"),
    lambda db: db.execute("UPDATE futures SET kind = 'forward' WHERE seq = 1"),
    lambda db: db.execute("UPDATE futures SET created = 1.0 WHERE seq = 1"),
    lambda db: db.execute("UPDATE futures SET seq = 9, id = owner || ':9' WHERE seq = 5"),
    lambda db: db.execute("DELETE FROM futures WHERE outcome IS NULL"),
    lambda db: db.execute("UPDATE models SET spec = replace(spec, '\"rank\":4', '\"rank\":8')"),
    lambda db: db.execute("UPDATE models SET spec = replace(spec, '\"seed\":', '\"seed\":1')"),
    lambda db: db.execute("UPDATE sessions SET finished = 'x'"),
    lambda db: db.execute("UPDATE journal SET content = ''"),
    lambda db: db.execute("DELETE FROM journal WHERE n = (SELECT max(n) FROM journal)"),
    lambda db: db.execute("CREATE TRIGGER t AFTER INSERT ON futures BEGIN DELETE FROM futures; END"),
]


async def test_changes_of_the_record_are_found(tmp_path: Path, tiny: Base):
    async with service(tmp_path, tiny) as tinker:
        model = await new_model(tinker)
        await results(tinker, plan(model)[:4])  # the state after the step is saved before the last is executed
        await tinker.submit(step(model, 5))
    assert not [*futures.problems(tmp_path)]
    path = tmp_path / futures.DATABASE
    whole = path.read_bytes()
    for lie in LIES:
        path.write_bytes(whole)
        connection = sqlite3.connect(path)
        lie(connection)
        connection.commit()
        connection.close()
        assert [*futures.problems(tmp_path)]
    path.write_bytes(whole)
    connection = sqlite3.connect(path)
    connection.executescript("UPDATE models SET spec = replace(spec, '\"rank\":4', '\"rank\":8')")
    connection.close()
    FutureStore(tmp_path).close()  # a server does not take over what was changed while none ran
    assert [*futures.problems(tmp_path)]
    path.write_bytes(whole)
    (tmp_path / "run.json").write_bytes(b"{}")
    assert [*futures.problems(tmp_path)]
    (tmp_path / "run.json").unlink()
    next((tmp_path / "states").iterdir()).write_bytes(b"")
    assert [*futures.problems(tmp_path)]


def test_rows_without_a_journal_are_found(tmp_path: Path):
    with closing(futures.connect(tmp_path / futures.DATABASE)) as db:
        assert not [*futures.problems(tmp_path)], "a start was killed before it made the journal"
        db.execute("INSERT INTO sessions VALUES ('s', 1.0, 1.0, NULL, '{}')")
    assert [*futures.problems(tmp_path)] == ["sessions has rows, but the database has no journal"]
