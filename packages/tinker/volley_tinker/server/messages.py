"""Tinker's training messages: requests as protocol buffers or JSON, results as protocol buffers or JSON.

The public SDK sends forward_backward as a protocol buffer (tinker_public.proto) and wants that result, and a sample's,
as one; everything else is JSON.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shared.errors import DecodeError, InputError
from volley_tinker.server import protobuf as pb

PROTOBUF = "application/x-protobuf"
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: Mapping[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    _INT64: np.dtype("<i8"),
    _INT32: np.dtype("<i4"),
}
_NAMES: Mapping[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_MOST_COLUMNS = 256
_MOST_DATUMS, _MOST_VALUES = 4096, 2**25


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence: `ids` int32 [T], and the loss's inputs by name, dense: [T] or [T, K]."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class PassRequest:
    """A forward_backward, or a forward only."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool

    def digest(self) -> str:
        """Return a digest of what is asked for, however it was written, in hex."""
        found = hashlib.sha256(repr((self.loss, sorted(self.config.items()), self.forward_only)).encode())
        for datum in self.data:
            for name, value in (("", datum.ids), *sorted(datum.inputs.items())):
                found.update(f"{name} {value.dtype} {value.shape}\n".encode())
                found.update(np.ascontiguousarray(value).tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """Result of a pass: each datum's log-probabilities float32 [T] or [T, K], and metrics `NAME:REDUCTION`."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


def pass_from_protobuf(data: bytes) -> PassRequest:
    """Read a ForwardBackwardRequest. Raises DecodeError, InputError."""
    found = pb.read(data)
    config: dict[str, float | str] = {}
    for entry in found.get(5, []):
        key, value = _entry(entry, frozenset({2}))
        config[key] = float(value) if isinstance(value, int | float) else 0.0
    for entry in found.get(7, []):
        key, value = _entry(entry)
        inner = pb.read(pb.part(value), doubles=frozenset({1}))
        config[key] = pb.text(inner[2][-1]) if 2 in inner else float(_number(inner.get(1, [0.0])[-1]))
    data_fields = found.get(3, [])
    if len(data_fields) > _MOST_DATUMS:
        raise InputError(f"{len(data_fields)} datums in one request, at most {_MOST_DATUMS} are taken")
    return PassRequest(
        model_id=_text(found, 1),
        seq_id=pb.signed(found.get(2, [0])[-1]),
        data=_bounded(_datum(pb.part(one)) for one in data_fields),
        loss=_text(found, 4),
        config=config,
        forward_only=bool(found.get(6, [0])[-1]),
    )


def _bounded(data: Iterable[Datum]) -> list[Datum]:
    """Raise InputError for too many values: a CSR tensor of few bytes may have many."""
    made, n = list[Datum](), 0
    for one in data:
        n += sum(value.size for value in one.inputs.values())
        if n > _MOST_VALUES:
            raise InputError(f"the loss's inputs have more than {_MOST_VALUES} values", "send fewer datums at once")
        made.append(one)
    return made


def _text(found: pb.Fields, number: int) -> str:
    return pb.text(found[number][-1]) if number in found else ""


def _number(value: pb.Value) -> float:
    if isinstance(value, memoryview):
        raise DecodeError("a field of the message has the wrong kind")
    return float(value)


def _entry(value: pb.Value, doubles: frozenset[int] = frozenset()) -> tuple[str, pb.Value]:
    found = pb.read(pb.part(value), doubles=doubles)
    return _text(found, 1), found.get(2, [memoryview(b"")])[-1]


def _datum(data: memoryview) -> Datum:
    found = pb.read(data)
    tokens = [_chunk(pb.part(one)) for one in found.get(1, [])]
    ids = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    inputs = {}
    for entry in found.get(2, []):
        name, value = _entry(entry)
        inputs[name] = _tensor(name, pb.part(value))
    return Datum(ids.astype(np.int32), inputs)


def _chunk(data: memoryview) -> np.ndarray:
    found = pb.read(data)
    if 1 not in found:
        raise InputError("a datum has an image or audio chunk", "the models here read text: send encoded_text chunks")
    inner = pb.read(pb.part(found[1][-1]))
    return _array(pb.part(inner.get(1, [memoryview(b"")])[-1]), np.dtype("<i4"), "tokens")


def _tensor(name: str, data: memoryview) -> np.ndarray:
    found = pb.read(data)
    dtype = _DTYPES.get(pb.signed(found.get(3, [0])[-1]))
    if dtype is None:
        raise InputError(f"loss_fn_inputs.{name} has no dtype of float32, int64, int32")
    shape = pb.integers(found.get(4, []))
    if 2 in found:
        csr = pb.read(pb.part(found[2][-1]))
        values, rows, columns = (
            _array(pb.part(csr.get(i, [memoryview(b"")])[-1]), kind, name)
            for i, kind in ((1, dtype), (2, np.dtype("<i8")), (3, np.dtype("<i8")))
        )
        return _dense(name, values, rows, columns, shape)
    return _shaped(name, _array(pb.part(found.get(1, [memoryview(b"")])[-1]), dtype, name), shape or None)


def _array(data: memoryview, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise DecodeError(f"{name} has {len(data)} bytes, which are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _dense(name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Make a dense array of a CSR tensor; entries that are not listed are 0. Raises InputError."""
    if not values.ndim == rows.ndim == columns.ndim == 1:
        raise InputError(f"loss_fn_inputs.{name}: a CSR tensor has one list each of values, row pointers and columns")
    if len(shape) != 2 or not (shape[0] >= 0 and 0 <= shape[1] <= _MOST_COLUMNS) or len(rows) != shape[0] + 1:
        raise InputError(f"loss_fn_inputs.{name} is no CSR tensor [T, K] with K up to {_MOST_COLUMNS}")
    counts = np.diff(rows)
    ends = (rows[0], rows[-1]) == (0, len(values))
    if not ends or (counts < 0).any() or len(columns) != len(values):
        raise InputError(f"loss_fn_inputs.{name}: its row pointers do not fit its values")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise InputError(f"loss_fn_inputs.{name} has a column outside its shape {list(shape)}")
    if shape[0] * shape[1] > _MOST_VALUES:
        raise InputError(f"loss_fn_inputs.{name} has more than {_MOST_VALUES} values")
    made = np.zeros((shape[0], shape[1]), values.dtype)
    made[np.repeat(np.arange(shape[0]), counts), columns] = values
    return made


def _shaped(name: str, values: np.ndarray, shape: Sequence[int] | None) -> np.ndarray:
    if shape is None:
        return values
    if len(shape) not in (1, 2) or any(n < 0 for n in shape) or math.prod(shape) != len(values):
        raise InputError(f"loss_fn_inputs.{name} has {len(values)} values and the shape {list(shape)}")
    if len(shape) == 2 and shape[1] > _MOST_COLUMNS:
        raise InputError(f"loss_fn_inputs.{name} has {shape[1]} columns, at most {_MOST_COLUMNS} are taken")
    return values.reshape(shape)


def pass_from_json(body: Mapping[str, Any], *, forward_only: bool) -> PassRequest:
    """Read the JSON form: `forward_backward_input` (or `forward_input`) with `data`, `loss_fn`, `loss_fn_config`.

    Raises InputError.
    """
    given = body.get("forward_backward_input", body.get("forward_input"))
    model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(given, dict) or not isinstance(given.get("data"), list):
        raise InputError("forward_backward_input must hold data, a list of datums")
    if not isinstance(model_id, str) or type(seq_id) is not int:
        raise InputError("model_id must be a text and seq_id a whole number")
    config = given.get("loss_fn_config") or {}
    if not isinstance(config, dict) or any(
        isinstance(v, bool) or not isinstance(v, int | float | str) for v in config.values()
    ):
        raise InputError("loss_fn_config must be an object of numbers and texts")
    if len(given["data"]) > _MOST_DATUMS:
        raise InputError(f"{len(given['data'])} datums in one request, at most {_MOST_DATUMS} are taken")
    return PassRequest(
        model_id,
        seq_id,
        _bounded(_datum_of_json(one) for one in given["data"]),
        str(given.get("loss_fn")),
        config,
        forward_only,
    )


def _datum_of_json(raw: Any) -> Datum:
    inputs = raw.get("loss_fn_inputs") if isinstance(raw, dict) else None
    if not isinstance(inputs, dict):
        raise InputError("a datum needs model_input and loss_fn_inputs")
    return Datum(
        np.array(prompt_ids(raw.get("model_input")), np.int32),
        {str(name): _tensor_of_json(name, value) for name, value in inputs.items()},
    )


def prompt_ids(raw: Any) -> list[int]:
    """Read a ModelInput of encoded_text chunks, or a plain list of ids. Raises InputError."""
    chunks = raw.get("chunks") if isinstance(raw, dict) else [{"tokens": raw}]
    if not isinstance(chunks, list):
        raise InputError("a model input needs chunks")
    ids = list[int]()
    for chunk in chunks:
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list) or any(type(one) is not int or not 0 <= one < 2**31 for one in tokens):
            raise InputError("a chunk must be encoded_text with tokens, a list of ids", "the models here read text")
        ids += tokens
    return ids


def _tensor_of_json(name: str, raw: Any) -> np.ndarray:
    given = raw if isinstance(raw, dict) else {"data": raw}
    dtype = _NAMES.get(str(given.get("dtype") or ("int64" if name == "target_tokens" else "float32")))
    if dtype is None:
        raise InputError(f"loss_fn_inputs.{name}: dtype must be float32 or int64")
    try:
        values = np.array(given.get("data"), np.float64 if dtype.kind == "f" else np.int64)
        rows, columns = (
            None if given.get(key) is None else np.array(given[key], np.int64)
            for key in ("sparse_crow_indices", "sparse_col_indices")
        )
        shape = None if given.get("shape") is None else [int(n) for n in given["shape"]]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"loss_fn_inputs.{name} is no array of numbers") from error
    if rows is not None and columns is not None:
        return _dense(name, values.astype(dtype), rows, columns, shape or [])
    if values.ndim not in (1, 2):
        raise InputError(f"loss_fn_inputs.{name} must be [T] or [T, K]")
    return _shaped(name, values.astype(dtype).reshape(-1), shape or values.shape)


def pass_to_protobuf(output: PassOutput) -> bytes:
    """Write a ForwardBackwardOutput. Log-probabilities of different widths K are written as records of their own."""
    made = pb.delimited(1, "ArrayRecord")
    runs: list[list[np.ndarray]] = []
    for one in output.logprobs:
        if not runs or runs[-1][-1].shape[1:] != one.shape[1:]:
            runs.append([])
        runs[-1].append(one)
    made += b"".join(pb.delimited(2, _record(run)) for run in runs)
    for name, value in output.metrics.items():
        made += pb.delimited(3, pb.delimited(1, name) + pb.double(2, value))
    return made


def _record(run: Sequence[np.ndarray]) -> bytes:
    offsets = np.cumsum([0, *(one.size * 4 for one in run)], dtype="<i8")
    values = b"".join(np.ascontiguousarray(one, "<f4").tobytes() for one in run)
    tensor = pb.delimited(1, values) + pb.delimited(2, offsets.tobytes()) + pb.varint(3, _FLOAT32)
    tensor += pb.packed(4, run[0].shape[1:])
    return (
        pb.delimited(1, "ArrayRecord")
        + pb.delimited(2, pb.delimited(1, "logprobs") + pb.delimited(2, tensor))
        + pb.varint(3, len(run))
    )


def pass_to_json(output: PassOutput) -> dict[str, Any]:
    """Write the JSON form of a pass's result."""
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": one.reshape(-1).tolist(), "dtype": "float32", "shape": list(one.shape)}}
            for one in output.logprobs
        ],
        "metrics": dict(output.metrics),
    }


def pass_output(data: bytes) -> PassOutput:
    """Read back what `pass_to_protobuf` wrote."""
    found = pb.read(data)
    logprobs = list[np.ndarray]()
    for record in found.get(2, []):
        (entry,) = pb.read(pb.part(record))[2]
        tensor = pb.read(pb.part(_entry(entry)[1]))
        offsets = np.frombuffer(pb.part(tensor[2][-1]), "<i8")
        values = np.frombuffer(pb.part(tensor.get(1, [memoryview(b"")])[-1]), "<f4")
        trailing = pb.integers(tensor.get(4, []))
        logprobs += [values[begin // 4 : end // 4].reshape(-1, *trailing) for begin, end in pairwise(offsets.tolist())]
    metrics = dict(_entry(entry, frozenset({2})) for entry in found.get(3, []))
    return PassOutput(logprobs, {name: _number(value) for name, value in metrics.items()})
