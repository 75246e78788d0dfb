"""Entry of the engine's process, `python -m services.rollout.engines.sglang_jax.worker FD`. Only `client` starts it.

The process reads its EngineSpec as the first message of the link, boots, then answers messages between steps. It ends
when the service closes the link, and with code 1 on any error of its own. Its only children compile grammars on trial
(`volley_serving.constraints`) and end within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.base import BASE_VERSION, EngineSpec
from services.rollout.engines.probe import check_probe
from services.rollout.engines.sglang_jax.link import BEAT_S, EngineLink, Message, ServiceGone, with_tuples
from services.rollout.engines.staged import StagedBase, StagedWeights
from shared import packages
from shared.errors import (
    Conflict,
    DeviceFailed,
    EngineDied,
    InputError,
    OutOfMemory,
    Unavailable,
    VolleyError,
    WeightsError,
    problem,
)
from shared.process import host_memory
from shared.process.imports import uncollected
from shared.process.parent import end_with_parent
from shared.process.telemetry import Log, configure
from shared.run.checkpoint_files import ManifestFile, ManifestLeaf

if TYPE_CHECKING:
    from services.rollout.engines.sglang_jax.loading.staging import LoadedArrays

log = Log("engine")
IDLE_WAIT_S = 0.2


@dataclasses.dataclass
class _Staged:
    version: str
    digest: str
    loaded: LoadedArrays
    probe_ids: Any


class EngineWorker:
    """Answers messages; the scheduler runs between them. Staging threads only read disk and fill new device arrays."""

    def __init__(self, link: EngineLink, scheduler: Any, dtype: str, grammars: Any) -> None:
        from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler

        self._link, self._dtype = link, dtype
        self._scheduler: RolloutScheduler = scheduler
        self._staged: _Staged | None = None
        self._loading = -1
        self._arrival: Arrival | None = None
        self._digest = ""
        self._probe_ids: Any = None
        self._known: LoadedArrays | None = None  # what was committed
        self._grammars, self._compiling = grammars, set[str]()
        self._loaded: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        """Serve without end. Raises ServiceGone when the service has closed the link."""
        busy = True
        while True:
            messages = self._link.receive(0.0 if busy else IDLE_WAIT_S)
            for message in messages:
                self._answer(message)
            while not self._loaded.empty():
                self._scheduler.settle()
                self._loaded.get()()
            busy = self._scheduler.turn() or bool(messages) or self._scheduler.step.compile_next()

    def _answer(self, message: Message) -> None:
        op = message["op"]
        if op == "generate":
            self._generate(message)
        elif op == "stage":
            self._stage(message["call"], _weights(message), arriving=message["arriving"])
        else:
            self._scheduler.settle()  # everything else happens between two steps
            self._reply(message["call"], lambda: getattr(self, f"_on_{op}")(message))

    def _generate(self, message: Message) -> None:
        """Queue a request; one with a grammar is queued once a thread has compiled it."""
        rid = message["rid"]
        if message["grammar"] is None:
            self._scheduler.add(message)
            return

        def compiled(matcher: Any, error: VolleyError | None) -> None:
            if error is not None:
                self._link.send({"op": "done", "results": [{"rid": rid, "error": problem(error)}]})
                return
            self._loaded.put(lambda: self._add_compiled(message, matcher))
            self._link.wake()

        self._compiling.add(rid)
        self._grammars.compile(message["grammar"], compiled)

    def _add_compiled(self, message: Message, matcher: Any) -> None:
        if message["rid"] in self._compiling:
            self._compiling.remove(message["rid"])
            self._scheduler.add(message, matcher)

    def _reply(self, call: int, work: Callable[[], Any]) -> None:
        try:
            answer = {"value": work()}
        except VolleyError as error:
            answer = {"error": problem(error)}
        self._link.send({"op": "reply", "call": call, **answer})

    def _stage(self, call: int, weights: StagedWeights, *, arriving: bool = False) -> None:
        self._staged, self._loading = None, call
        self._arrival = Arrival(partial(self._check_wanted, call, weights), is_complete=not arriving)
        threading.Thread(target=self._load, args=(call, weights, self._arrival), daemon=True).start()

    def _load(self, call: int, weights: StagedWeights, arrival: Arrival) -> None:
        """Read and verify the weights in a thread of its own; the loop's thread then checks and keeps them.

        Nothing is read if the serving arrays have the same digest and still the same checksum: memory can lose a bit.
        """
        from services.rollout.engines.sglang_jax.loading.checksum import checksum
        from services.rollout.engines.sglang_jax.loading.staging import load_leaves

        try:
            live, known = self._scheduler.step.weights.arrays, self._known
            start, serves = time.perf_counter(), weights.kind == "chunks" and weights.digest == self._digest
            if serves and known is not None and _are_same(live, known) and checksum(live) == known.checksum:
                loaded = known._replace(timings={"checksum_s": time.perf_counter() - start})
            else:
                base = None if known is None else known.base
                loaded = load_leaves(self._scheduler.runner, weights, arrival, base)
        except Exception as error:  # noqa: BLE001 - whatever fails here concerns these weights, not the engine
            # Without its traceback, whose frames hold the arrays that were loaded until the next garbage collection.
            failure = _as_weights_error(error, weights.version).with_traceback(None)
            self._loaded.put(lambda: self._reply(call, lambda: _throw(failure)))
        else:
            self._loaded.put(lambda: self._reply(call, lambda: self._keep(call, weights, loaded)))
        self._link.wake()

    def _keep(self, call: int, weights: StagedWeights, loaded: LoadedArrays) -> Message:
        from services.rollout.engines.sglang_jax.loading.scoring import score

        self._check_wanted(call, weights)
        start, ids, expected = time.perf_counter(), weights.probe_ids, weights.probe_logprobs
        logprobs = None if ids is None else score(self._scheduler, ids, loaded.weights)
        if logprobs is not None and expected is not None:
            check_probe(logprobs, expected, weights.probe_noise, self._dtype)
        self._staged = _Staged(weights.version, weights.digest, loaded, ids)
        timings = {**loaded.timings, "probe_s": time.perf_counter() - start}
        return {"checksum": loaded.checksum, "timings": timings}

    def _check_wanted(self, call: int, weights: StagedWeights) -> None:
        if call != self._loading:
            raise Conflict(
                f"loading {weights.version} was cancelled: other weights are being staged, or the caller left"
            )

    def _on_arrived(self, message: Message) -> None:
        if self._arrival is not None and message["of"] == self._loading:
            self._arrival.complete()

    def _on_forget(self, message: Message) -> None:
        """Drop the weights that a call loads or has staged; the loading thread frees its memory at its next check."""
        if message["of"] == self._loading:
            self._staged, self._loading = None, -1

    def _on_commit(self, message: Message) -> Message:
        staged, current = self._staged, self._scheduler.version
        if staged is None or staged.version != message["version"]:
            raise Conflict(
                f"{message['version']} is not staged (staged: {staged.version if staged else 'nothing'})",
                "stage it first",
            )
        start = time.perf_counter()
        counts = self._scheduler.swap(staged.loaded.weights, staged.version, message["mode"])
        self._staged, self._digest, self._probe_ids = None, staged.digest, staged.probe_ids
        self._known = staged.loaded
        live = {"version": self._scheduler.version, "checksum": self._live_checksum(), "logprobs": None}
        self._loaded.put(host_memory.release_freed)  # after the answer: it takes up to half a second
        return {
            "version": staged.version,
            "previous": current,
            **counts,
            "live": live,
            "pause_s": time.perf_counter() - start,
        }

    def _live_checksum(self) -> str:
        """Checksum of the arrays that the next step uses.

        Arrays are immutable: if they are the staged ones, their checksum is known from staging.
        """
        from services.rollout.engines.sglang_jax.loading.checksum import checksum

        live, known = self._scheduler.step.weights.arrays, self._known
        return known.checksum if known is not None and _are_same(live, known) else checksum(live)

    def _on_audit(self, _: Message) -> Message:
        """Compute checksum and probe again, from the arrays that the next step uses, not from the staged ones."""
        from services.rollout.engines.sglang_jax.loading.checksum import checksum
        from services.rollout.engines.sglang_jax.loading.scoring import score

        scheduler = self._scheduler
        logprobs = None if self._probe_ids is None else score(scheduler, self._probe_ids, passes=1)
        return {
            "version": scheduler.version,
            "checksum": checksum(scheduler.step.weights.arrays),
            "logprobs": logprobs,
        }

    def _on_score(self, message: Message) -> Message:
        from services.rollout.engines.sglang_jax.loading.scoring import score_with_top

        scheduler, ids = self._scheduler, message["ids"]
        scored = score_with_top(scheduler, ids, message["top_logprobs"])
        if scored is None or len(scored["logprobs"]) < len(ids) - 1:
            raise InputError(
                f"{len(ids)} tokens do not fit the engine's pool of {scheduler.max_total_num_tokens} tokens"
            )
        return scored | {"version": scheduler.version or ""}

    def _on_status(self, _: Message) -> Message:
        scheduler = self._scheduler
        return {
            "current": scheduler.version,
            "staged": self._staged.version if self._staged else None,
            "digest": self._digest,
            "paused": scheduler.paused,
            "running": len(scheduler.live()) - len(scheduler.waiting_queue),
            "queued": len(scheduler.waiting_queue),
            "output_tokens": scheduler.output_tokens,
            "free_kv_tokens": int(scheduler.token_to_kv_pool_allocator.available_size()),
            "cached_kv_tokens": int(scheduler.tree_cache.evictable_size()),
            "compilations": scheduler.step.compilations,
            "steps": scheduler.counts,
        }

    def _on_abort(self, message: Message) -> int:
        doomed = {rid for rid in self._compiling if message["rid"] in (None, rid)}
        self._compiling -= doomed
        for rid in doomed:
            self._scheduler.drop(rid)
        return len(doomed) + self._scheduler.abort(message["rid"])

    def _on_pause(self, _: Message) -> None:
        self._scheduler.paused = True

    def _on_resume(self, _: Message) -> None:
        self._scheduler.paused = False

    def _on_flush(self, _: Message) -> None:
        self._scheduler.flush()


def _are_same(live: list[Any], known: LoadedArrays) -> bool:
    """Return whether the arrays are the same objects that were loaded."""
    arrays = known.weights.arrays
    return len(live) == len(arrays) and all(a is b for a, b in zip(live, arrays, strict=True))


def _weights(message: Message) -> StagedWeights:
    """Rebuild the StagedWeights that `client` sent with `dataclasses.asdict`."""
    fields = {field.name: message[field.name] for field in dataclasses.fields(StagedWeights)}
    base = fields["base"]
    return StagedWeights(
        **fields | _listed(fields) | {"base": None if base is None else StagedBase(**base | _listed(base))}
    )


def _listed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild files and tree."""
    files = tuple(ManifestFile(**file) for file in fields["files"])
    tree = tuple(ManifestLeaf(leaf["key"], tuple(leaf["shape"]), leaf["dtype"]) for leaf in fields["tree"])
    return {"files": files, "tree": tree}


def _as_weights_error(error: Exception, version: str) -> VolleyError:
    """Translate an error of loading, after which the old weights keep serving.

    Faults of files and devices concern the machine: another try may succeed, so the caller decides how many follow.
    All others concern these weights.
    """
    if isinstance(error, VolleyError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)):
        return OutOfMemory(f"weights {version} do not fit next to the serving ones: {error}")
    log.warning("stage failed", version=version, error=repr(error))
    kind: type[VolleyError] = Unavailable if isinstance(error, OSError | RuntimeError) else WeightsError
    return (DeviceFailed if _is_of_device(error) else kind)(
        f"weights {version} cannot be loaded: {type(error).__name__}: {error}"
    )


def _throw(error: VolleyError) -> None:
    raise error


def _bind_life_to_parent() -> None:
    """End this process when the service dies, even while compiling, and ignore signals to the whole process group.

    The service handles those signals, and drains first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def beat(link: EngineLink) -> None:
    """Thread that tells the service that this process runs, also while a step compiles."""
    with contextlib.suppress(ServiceGone):  # the loop's thread ends the process
        while True:
            link.send({"op": "beat"})
            time.sleep(BEAT_S)


def main(fd: int) -> int:
    """Boot and serve. Returns the exit code."""
    configure("rollout-engine")
    _bind_life_to_parent()
    start = time.perf_counter()
    link = EngineLink(socket.socket(fileno=fd))
    threading.Thread(target=beat, args=(link,), daemon=True).start()
    try:
        (message,) = link.receive(60.0)
        spec = EngineSpec(**with_tuples(message["spec"]))
        worker, info = _boot(spec, link)
        link.send({"op": "ready", "info": {**info, "boot_s": time.perf_counter() - start, "pid": os.getpid()}})
        worker.run()
    except ServiceGone:
        return 0
    except Exception as error:
        log.exception("engine died")
        with contextlib.suppress(ServiceGone):
            link.send({"op": "fatal", "error": problem(translated(error))})
        return 1


def translated(error: Exception) -> VolleyError:
    """Translate an error for the service: a device fault may be temporary, any other foreign error is a bug."""
    if isinstance(error, VolleyError):
        return error
    text = f"{type(error).__name__}: {error}"
    return EngineDied(text) if _is_of_device(error) else VolleyError(text)


def _is_of_device(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError)


def _boot(spec: EngineSpec, link: EngineLink) -> tuple[EngineWorker, Message]:
    with uncollected():
        from services.rollout.engines.sglang_jax.boot import build_scheduler, describe, precompile
        from services.rollout.engines.sglang_jax.scheduling.shapes import KnownShapes, file_of

    scheduler = build_scheduler(spec, link, BASE_VERSION if spec.load_weights else None)
    precompile(scheduler, spec)
    scheduler.step.shapes = KnownShapes(file_of(spec))
    constraints, grammars = packages.part("constraints", required=False), None
    if constraints is not None:
        scheduler.guide_of = constraints.guide_of
    info = describe(scheduler, spec)
    if constraints is not None:
        eos = next(iter(info["eos_token_ids"]), None)
        grammars = constraints.Grammars(spec.tokenizer, info["vocab_size"], eos)
    return EngineWorker(link, scheduler, spec.dtype, grammars), info


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
