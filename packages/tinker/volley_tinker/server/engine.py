"""Execution of clients' requests on their models. Blocking, for one thread.

Invariants: a model's requests run in the order of their numbers; a model that is not in memory is made from its saved
state and the requests after it, in order, which gives the same bits; a file is durable before the request that wrote it
is settled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from services.trainer.models.lora import LoraOptions
from shared.errors import InputError, NotFound, VolleyError, WeightsError
from shared.files import storage
from shared.models import adapter
from shared.models.config import CONFIG
from shared.models.weight_files import SCALE, UNMERGED, WEIGHTS
from shared.process import telemetry
from volley_convert.export import peft_config
from volley_convert.exported_files import write_json
from volley_tinker.futures import file_digest
from volley_tinker.server import batches, messages, specs
from volley_tinker.server.batches import BatchShapes
from volley_tinker.server.entries import JSON, UNNAMED, Checkpoint, Future, History, RequestResult, created, failed
from volley_tinker.server.learner import Adam, Base, ClientModel, params_only, saved_params
from volley_tinker.server.messages import PassRequest
from volley_tinker.server.specs import ModelSpec

_SMALL_BYTES = 64 * 2**20
_STEPS, _SECONDS = 16, 60.0
_MOST_LOADED, _MOST_EXPORTED = 16, 4
_log = telemetry.Log("tinker")

_KINDS = {"save_weights": "training", "save_weights_for_sampler": "sampler", "save_weights_external": "external"}

type FindCheckpoint = Callable[[str], Checkpoint]


@dataclass
class _Loaded:
    model: ClientModel
    spec: ModelSpec
    unsaved: int = 0
    saved_at: float = 0.0


class TrainEngine:
    """Models in memory, by name.

    Args:
        folder: files of states and checkpoints lie below it.
        checkpoint: finds a checkpoint by its address; raises NotFound.
    """

    def __init__(self, base: Base, shapes: BatchShapes, folder: Path, checkpoint: FindCheckpoint) -> None:
        self.base, self.shapes, self._folder, self._checkpoint = base, shapes, folder, checkpoint
        self._loaded = OrderedDict[str, _Loaded]()
        for name in ("states", "checkpoints", "samplers"):
            (folder / name).mkdir(exist_ok=True)

    def has(self, model: str) -> bool:
        return model in self._loaded

    def load(self, model: str, history: History) -> None:
        """Make a model. Raises WeightsError if its past does not repeat."""
        spec, arrays = history.spec, None
        if history.state is not None:
            arrays = read_arrays(self._folder / history.state[1])
        made = ClientModel(self.base, self.shapes, lora_of(spec), spec.seed, arrays)
        if history.state is not None and made.checksum() != history.state[2]:
            raise WeightsError(f"the saved state of {model} has other weights than when it was saved")
        self._loaded[model] = _Loaded(made, spec)
        try:
            for future, weights in history.after:
                self._repeat(model, future, weights)
        except VolleyError:
            self.forget(model)
            raise
        except Exception as error:
            self.forget(model)
            raise WeightsError(f"{model} cannot be restored: {error!r}"[:1000]) from error
        while len(self._loaded) > _MOST_LOADED:
            self._loaded.popitem(last=False)

    def _repeat(self, model: str, future: Future, weights: str) -> None:
        client = self._loaded[model].model
        if future.outcome == "failed":
            if future.kind == "optim_step":
                client.forget_gradient()
            return
        if future.kind not in ("forward_backward", "optim_step", "load_weights"):
            return
        if future.body is None:
            raise WeightsError(f"the request {future.id} is needed to restore its model, and was removed")
        if future.kind == "forward_backward":
            client.run(read_pass(future))
        elif future.kind == "optim_step":
            client.step(Adam(**specs.adam(orjson.loads(future.body))), check=False)
        else:
            self._load_weights(client, orjson.loads(future.body))
        if weights and client.checksum() != weights:
            raise WeightsError(
                f"{future.id}, repeated from the saved state, gives other weights than the first time",
                "was the server's machine, its JAX or its model changed? Load a checkpoint into a new model",
            )

    def forget(self, model: str) -> None:
        """Drop a model from memory."""
        self._loaded.pop(model, None)

    def execute(self, future: Future) -> RequestResult:
        """Execute a request of a loaded model; an error becomes its result, and a step that fails clears the gradient.

        After an error that is nobody's, the model is made again from its past before the next request.
        """
        self._loaded.move_to_end(future.owner)
        try:
            return self._execute(future)
        except VolleyError as error:
            if future.kind == "optim_step":
                self._loaded[future.owner].model.forget_gradient()
            return failed(error)
        except Exception as error:  # noqa: BLE001 - it would end the server, which then executes the request again
            _log.exception("request failed", future=future.id)
            self.forget(future.owner)
            return failed(VolleyError(f"{future.kind} failed: {error!r}"[:1000]))

    def _execute(self, future: Future) -> RequestResult:
        loaded = self._loaded[future.owner]
        assert future.body is not None
        match future.kind:
            case "create_model":
                return created(future.owner)
            case "forward" | "forward_backward":
                request = read_pass(future)
                batches.check(request, self.shapes)
                return RequestResult("done", messages.pass_to_protobuf(loaded.model.run(request)))
            case "optim_step":
                body = orjson.loads(future.body)
                metrics = loaded.model.step(Adam(**specs.adam(body)))
                return self._changed(loaded, {"metrics": metrics, "type": "optim_step"})
            case "load_weights":
                body = orjson.loads(future.body)
                self._load_weights(loaded.model, body)
                answer = {"path": body["path"], "model_id": future.owner, "type": "load_weights"}
                return self._changed(loaded, answer, urgent=True)
            case "save_weights" | "save_weights_for_sampler":
                return self._save(future, loaded, orjson.loads(future.body))
            case "save_weights_external":
                return self._save_external(future, loaded, orjson.loads(future.body))
            case _:
                raise InputError(f"{future.kind} is not executed on a model")

    def _changed(self, loaded: _Loaded, answer: Mapping[str, Any], *, urgent: bool = False) -> RequestResult:
        loaded.unsaved += _STEPS if urgent else 1
        return RequestResult("done", orjson.dumps(answer), loaded.model.checksum())

    def _load_weights(self, client: ClientModel, body: Mapping[str, Any]) -> None:
        found = self._checkpoint(specs.text(body, "path"))
        optimizer = bool(body.get("optimizer"))
        if optimizer and found.kind != "training":
            raise InputError(f"{found.path} has no optimizer state", "load it without")
        client.load(read_arrays(self._folder / found.file), optimizer=optimizer)

    def _save(self, future: Future, loaded: _Loaded, body: Mapping[str, Any]) -> RequestResult:
        training, model = future.kind == "save_weights", future.owner
        session_seq = body.get("sampling_session_seq_id")
        name = specs.name(body.get("path"), f"{UNNAMED}{future.seq}")
        path = f"tinker://{model}/{'weights' if training else 'sampler_weights'}/{name}"
        if body.get("overwrite") is not True and not self._is_free(path):
            raise InputError(f"{path} exists", "choose another name, or overwrite it")
        arrays = loaded.model.state() if training else params_only(loaded.model.params())
        file = f"checkpoints/{hashlib.sha256(f'{path} {future.seq}'.encode()).hexdigest()[:32]}.safetensors"
        digest, size = write_arrays(self._folder / file, arrays)
        checkpoint = self._checkpoint_of(future, path, file, digest, size)
        answer, sampler = {"path": path, "type": future.kind}, None
        if not training and session_seq is not None:
            session = model.rpartition(":train:")[0]
            sampler = (
                f"{session}:sample:{specs.whole('sampling_session_seq_id', session_seq, 0, 2**62)}",
                session,
                path,
            )
            answer |= {"sampling_session_id": sampler[0]}
        return RequestResult("done", orjson.dumps(answer), checkpoint=checkpoint, sampler=sampler)

    def _save_external(self, future: Future, loaded: _Loaded, body: Mapping[str, Any]) -> RequestResult:
        """Write adapters as PEFT does, or all parameters as a Hugging Face folder."""
        if body.get("age_encryption_recipients"):
            raise InputError("age_encryption_recipients is not supported", "encrypt the files after their download")
        name = specs.name(body.get("path"), f"external-{future.seq}")
        path, spec, params = f"tinker://{future.owner}/external_weights/{name}", loaded.spec, loaded.model.params()
        if not self._is_free(path):
            raise InputError(f"{path} exists", "choose another name")
        folder = self._folder / "external" / hashlib.sha256(f"{path} {future.seq}".encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        if spec.rank:
            tensors = dict(adapter.peft(*item) for item in params.items())
            file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
            described = peft_config(self.base.described, spec.rank, specs.ALPHA, spec.base, tensors)
        else:
            tensors = self.base.tensors(params)
            file, config, described = folder / WEIGHTS, folder / CONFIG, self.base.described.to_hf()
        write_json(config, described)
        digest, size = write_arrays(file, tensors)
        checkpoint = self._checkpoint_of(future, path, str(file.relative_to(self._folder)), digest, size)
        answer = {"path": path, "size_bytes": size, "type": future.kind}
        return RequestResult("done", orjson.dumps(answer), checkpoint=checkpoint)

    def _checkpoint_of(self, future: Future, path: str, file: str, digest: str, size: int) -> Checkpoint:
        body, now = orjson.loads(future.body or b"{}"), time.time()
        ttl = specs.ttl(body.get("ttl_seconds"))
        return Checkpoint(
            path,
            future.owner,
            _KINDS[future.kind],
            path.rpartition("/")[2],
            file,
            digest,
            size,
            now,
            None if ttl is None else now + ttl,
            public=False,
            spec=self._loaded[future.owner].spec.to_json(),
            metadata=specs.metadata(body.get("user_metadata")),
        )

    def _is_free(self, path: str) -> bool:
        try:
            self._checkpoint(path)
        except NotFound:
            return True
        return False

    def state_due(self, model: str) -> bool:
        """Return whether the model's state should be saved now: small ones after every step."""
        loaded = self._loaded.get(model)
        if loaded is None or not loaded.unsaved:
            return False
        late = loaded.saved_at and time.monotonic() - loaded.saved_at > _SECONDS
        return loaded.model.n_bytes <= _SMALL_BYTES or loaded.unsaved >= _STEPS or bool(late)

    def save_state(self, model: str, seq: int) -> tuple[str, str, str]:
        """Write a model's state after its request `seq`; return file, digest and checksum of the weights."""
        loaded = self._loaded[model]
        file = f"states/{hashlib.sha256(model.encode()).hexdigest()[:24]}-{seq}.safetensors"
        digest, _ = write_arrays(self._folder / file, loaded.model.state())
        loaded.unsaved, loaded.saved_at = 0, time.monotonic()
        return file, digest, loaded.model.checksum()

    def export(self, checkpoint: Checkpoint | None, name: str) -> Path:
        """Write whole weights for a rollout server as the folder `name`: the base's without a checkpoint.

        Adapters are written beside their base, unmerged, and before it: a folder with weights is whole.
        """
        folder = self._folder / "samplers" / name
        if (folder / WEIGHTS).is_file():
            os.utime(folder)  # the oldest folders are removed
            return folder
        lora: LoraOptions | None = None
        if checkpoint is None:
            params = self.base.initial(None, 0)
        else:
            lora = lora_of(ModelSpec.from_json(checkpoint.spec))
            params = saved_params(read_arrays(self._folder / checkpoint.file))
        folder.mkdir(exist_ok=True)
        _remove_all_but_newest(folder.parent)
        if lora is not None:
            write_arrays(folder / UNMERGED, {**params, SCALE: np.asarray(lora.scale, np.float32)})
            params = self.base.frozen(lora)
        write_arrays(folder / WEIGHTS, self.base.tensors(params))
        return folder


def _remove_all_but_newest(root: Path) -> None:
    exported = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in exported[:-_MOST_EXPORTED]:
        shutil.rmtree(path, ignore_errors=True)


def lora_of(spec: ModelSpec) -> LoraOptions | None:
    return LoraOptions(spec.rank, specs.ALPHA, spec.target_modules) if spec.rank else None


def read_pass(future: Future) -> PassRequest:
    """Read a recorded pass. Raises DecodeError, InputError."""
    assert future.body is not None
    forward_only = future.kind == "forward"
    if future.media == JSON:
        return messages.pass_from_json(orjson.loads(future.body), forward_only=forward_only)
    return replace(messages.pass_from_protobuf(future.body), forward_only=forward_only)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read safetensors. Raises WeightsError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path.name} cannot be read: {error}", "was its checkpoint deleted or overwritten?"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """Write arrays as safetensors, durably; return digest and size of the file. Raises StorageFull."""
    draft = path.with_name(f".{path.name}.tmp")
    with storage.storage(path.parent):
        save_file({name: np.asarray(value, order="C") for name, value in arrays.items()}, draft, {"format": "pt"})
        storage.fsync(draft)
        digest, size = file_digest(draft), draft.stat().st_size
        os.replace(draft, path)
        storage.fsync(path.parent)
    return digest, size
