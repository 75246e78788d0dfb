"""Folders whose files and fields `tests.support.believed` walks: of a run, of a fork of it, of a Tinker server."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from shared.engines import DeclaredEngine
from shared.run import data, trust
from shared.run.folder import RunFolder
from shared.run.mixture import MixtureChange
from tests.support import lies
from tests.support.small_run import RUN, Incarnation
from volley.runs.record import claimed, mark_finished
from volley_proof.forks import training
from volley_proof.forks.plan import Wanted, planned
from volley_python.folder import forks
from volley_python.folder.forks import Fork
from volley_tinker import futures
from volley_tinker.server.entries import JSON, Checkpoint, Request, RequestResult, created
from volley_tinker.server.store import FutureStore


def make(place: Path) -> list[Path]:
    run = lies.make(place / RUN, _with_more)
    _handed_over(RunFolder(run))
    trust.accept(RunFolder(run))  # to fork it; copies of it are not trusted
    return [run, _forked(run), _tinker(place / "tinker")]


def _with_more(run: RunFolder) -> None:
    """A submitted environment, with its evaluation, and changes of the mixture."""
    source = run.environments / "made" / "2" / data.SOURCE
    source.mkdir(parents=True)
    (source / "made.py").write_bytes(b"reward = 1\n")
    (source / "other.py").write_bytes(b"reward = 2\n")
    submitted = {
        "name": "made",
        "version": 2,
        "digest": "0" * 64,
        "size": 11,
        "history": [{"state": "active", "at": 1.0}],
    }
    (source.parent / "record.json").write_bytes(orjson.dumps(submitted))
    digest = data.tree_digest(source)
    parts = {"train": {"source": "/data/train.jsonl", "digest": "a" * 64}}
    played = {"made@2": {data.SOURCE: {"source": str(source), "digest": digest}}, "toy": parts}
    run.environment_data.write_bytes(orjson.dumps(played))
    result = {"n_tasks": 10, "success": 0.5, "reward_mean": 0.5, "failed": 0}
    version = {"step": 0, "version_min": "e000001-s000000", "version_max": "e000001-s000000"}
    known = [{"env": "made@2", "data": {data.SOURCE: digest}}, {"data": {"train": "a" * 64}}]
    run.evals.write_bytes(b"".join(orjson.dumps(version | result | one) + b"\n" for one in known))
    changes = MixtureChange(3, {"toy": 2}, why="a", at=1.0), MixtureChange(5, {"toy": 1}, why="b", at=2.0)
    run.mixture.write_bytes(b"".join(one.encode() for one in changes))


def _handed_over(run: RunFolder) -> None:
    engine = DeclaredEngine.of_kind("sglang_jax").to_json()
    lies.rewrite(
        run.handovers, [one | {"servers": [{"url": "a", "engine": engine}]} for one in lies.lines(run.handovers)]
    )


def _forked(run: Path) -> Path:
    """A fork that has trained two steps, judged by another environment."""
    plan = planned(RunFolder(run), Wanted(3, 2, 0.3), ["algorithm.name=dppo"])
    training.prepare(plan)
    with claimed(plan.loaded, free=forks.FREE) as claim, ThreadPoolExecutor(1) as executor:
        one = Incarnation(claim.folder.path, executor, fork=Fork.read(claim.folder), max_to_keep=9)
        asyncio.run(one.run_until(lambda status: status.phase in ("done", "refused")))
        mark_finished(claim.folder, claim.record)
    return plan.folder.path


def _tinker(folder: Path) -> Path:
    """Two models with saved states, a checkpoint each, results that have expired, and a request under way."""
    store = FutureStore(folder)
    try:
        for n in range(2):
            session = f"session{n}"
            store.add_session(session, {"tags": [str(n)]})
            store.add_sampler(f"{session}:sample:0", session, None)
            _trained(store, session, rank=4 * n + 4)
        store.expire_results(0.0)
        store.finish_session("session0", "it was closed")
    finally:
        store.close()
    return folder


def _trained(store: FutureStore, session: str, rank: int) -> None:
    model = f"{session}:train:0"
    spec = {"base": "tiny", "rank": rank, "seed": rank, "attention": True, "mlp": True, "unembedding": False}
    store.settle(store.add_model(model, session, spec, _request(model, 0, "create_model")), created(model))
    checksums = ["", "a" * 64, "", "", "b" * 64]
    for seq, kind in enumerate(("forward_backward", "optim_step", "save_weights", "forward_backward", "optim_step"), 1):
        saved = _checkpoint(store, model, spec) if kind == "save_weights" else None
        result = RequestResult("done", orjson.dumps({"seq": seq}), checksums[seq - 1], saved)
        store.settle(store.record(_request(model, seq, kind)), result)
        if seq == 2:
            file, digest = _file(store.folder, f"states/{session}.safetensors", b"state of " + session.encode())
            store.set_state(model, seq, file, digest, checksums[1])
    store.record(_request(model, 6, "forward_backward"))


def _request(model: str, seq: int, kind: str) -> Request:
    body = orjson.dumps({"model": model, "seq": seq})
    return Request(model, seq, kind, body, JSON, hashlib.sha256(body).hexdigest())


def _checkpoint(store: FutureStore, model: str, spec: dict[str, object]) -> Checkpoint:
    session = model.partition(":")[0]
    file, digest = _file(store.folder, f"checkpoints/{session}.safetensors", b"weights of " + session.encode())
    path, size = f"tinker://{model}/weights/a", (store.folder / file).stat().st_size
    return Checkpoint(path, model, "training", "a", file, digest, size, 1.0, None, False, spec, {"by": session})


def _file(folder: Path, name: str, text: bytes) -> tuple[str, str]:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(text)
    return name, futures.file_digest(folder / name)
