"""Tinker's protocol buffers: what the SDK writes is read, what is written it reads, hostile bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import DecodeError, InputError
from volley_tinker.server import messages, samples
from volley_tinker.server import protobuf as pb
from volley_tinker.server.messages import PassOutput


def tensor(values: np.ndarray, dtype: int) -> bytes:
    return pb.delimited(1, values.tobytes()) + pb.varint(3, dtype) + pb.packed(4, values.shape)


def entry(number: int, key: str, value: bytes) -> bytes:
    return pb.delimited(number, pb.delimited(1, key) + value)


def request() -> bytes:
    chunk = pb.delimited(1, pb.delimited(1, pb.delimited(1, np.array([5, 6, 7], "<i4").tobytes())))
    csr = pb.delimited(1, np.array([9, 8], "<i8").tobytes()) + pb.delimited(2, np.array([0, 1, 1, 2], "<i8").tobytes())
    sparse = (
        pb.delimited(2, csr + pb.delimited(3, np.array([0, 1], "<i8").tobytes()))
        + pb.varint(3, 2)
        + pb.packed(4, [3, 2])
    )
    weights = pb.delimited(2, tensor(np.array([1, 0, 2.5], "<f4"), 1))
    datum = chunk + entry(2, "target_tokens", pb.delimited(2, sparse)) + entry(2, "weights", weights)
    made = pb.delimited(1, "s:train:0") + pb.varint(2, 4) + pb.delimited(3, datum) + pb.delimited(4, "ppo")
    made += entry(5, "clip_low_threshold", pb.double(2, 0.5)) + pb.varint(6, 1)
    return (
        made
        + entry(7, "note", pb.delimited(2, pb.delimited(2, "x")))
        + entry(7, "beta", pb.delimited(2, pb.double(1, 2)))
    )


def test_a_pass_is_read():
    found = messages.pass_from_protobuf(request())
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("s:train:0", 4, "ppo", True)
    assert found.config == {"clip_low_threshold": 0.5, "note": "x", "beta": 2.0}
    (datum,) = found.data
    assert datum.ids.tolist() == [5, 6, 7]
    assert datum.inputs["target_tokens"].tolist() == [[9, 0], [0, 0], [0, 8]]
    assert datum.inputs["weights"].tolist() == [1, 0, 2.5]


def test_the_json_form_asks_for_the_same():
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [9, 0, 0, 0, 0, 8], "dtype": "int64", "shape": [3, 2]},
            "weights": {"data": [1, 0, 2.5], "dtype": "float32"},
        },
    }
    config = {"clip_low_threshold": 0.5, "note": "x", "beta": 2.0}
    given = {"data": [data], "loss_fn": "ppo", "loss_fn_config": config}
    body = {"model_id": "s:train:0", "seq_id": 4, "forward_backward_input": given}
    found = messages.pass_from_json(body, forward_only=True)
    assert found.digest() == messages.pass_from_protobuf(request()).digest()
    assert found.digest() != messages.pass_from_json(body, forward_only=False).digest()


def test_results_are_read_back():
    logprobs = [
        np.array([-1, -2.5], np.float32),
        np.array([[-1, -2], [-3, -4]], np.float32),
        np.array([-7], np.float32),
    ]
    made = messages.pass_to_protobuf(PassOutput(logprobs, {"loss:sum": -0.125, "tokens:sum": 3.0}))
    found = messages.pass_output(made)
    assert [one.tolist() for one in found.logprobs] == [one.tolist() for one in logprobs]
    assert found.metrics == {"loss:sum": -0.125, "tokens:sum": 3.0}
    assert messages.pass_to_json(found)["loss_fn_outputs"][1]["logprobs"]["shape"] == [2, 2]


def test_bytes_that_are_no_message_are_refused():
    whole, rng = request(), np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        try:
            messages.pass_from_protobuf(bytes(damaged[: rng.integers(1, len(whole) + 1)]))
        except InputError:
            continue


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\xff" * 11, b"\x0a\x7f\x00", b"\x0b", b"\x00" * 200_000])
def test_broken_messages_are_refused(data: bytes):
    with pytest.raises(DecodeError):
        messages.pass_from_protobuf(data)


def test_a_sample_is_read_and_written():
    body = {
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 90, "seed": 7, "stop": [4], "temperature": 0.5},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 1,
    }
    asked = samples.sample_request(body, 50)
    assert asked.call(1)["sampling_params"] == {
        "max_new_tokens": 47,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [4],
        "sampling_seed": 8,
    }
    assert "logprob_start_len" in asked.call(0)
    assert "logprob_start_len" not in asked.call(1)
    meta = {
        "output_token_logprobs": np.array([-0.5], np.float32),
        "finish_reason": {"type": "length"},
        "output_top_logprobs": [[[-0.5, 9, None]]],
        "input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]],
        "input_top_logprobs": [None, [[-1.0, 5, None], [-2.0, 6, None]], [[-1.0, 7, None]]],
        "cached_tokens": 2,
    }
    answer = {"output_ids": np.array([9], np.int32), "meta_info": meta}
    made = samples.result(asked, [answer, answer])
    top = pb.read(pb.part(pb.read(made)[3][0]))
    assert np.frombuffer(pb.part(top[1][0]), "<i4").tolist() == [0, 0, 5, 6, 7, 0]
    assert np.frombuffer(pb.part(top[2][0]), "<f4").tolist() == [-99999, -99999, -1, -2, -1, -99999]
    found = samples.to_json(made)
    assert [one["tokens"] for one in found["sequences"]] == [[9], [9]]
    assert found["sequences"][0]["stop_reason"] == "length"
    assert found["prompt_logprobs"] == [None, -1.0, -2.0]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": {"chunks": [{"type": "image", "data": "x"}]}},
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [1] * 50}]}},
        {"num_samples": 0},
        {"num_samples": True},
        {"sampling_params": {"max_tokens": -1}},
        {"sampling_params": {"stop": [1, "a"]}},
        {"prompt_alt_tokens_k": 2},
        {"topk_prompt_logprobs": 1000},
        {"prompt_logprobs_last_n": 9},
    ],
)
def test_a_wrong_sample_is_refused(change: dict[str, object]):
    with pytest.raises(InputError):
        samples.sample_request({"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, **change}, 50)


@pytest.mark.parametrize(
    "tensor",
    [
        {"data": [1], "dtype": ["float32"]},
        {"data": 1.0, "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
        {"data": [1.0], "shape": [1, 2], "sparse_crow_indices": [[0, 0], [1, 1]], "sparse_col_indices": [0]},
        {"data": [1.0], "shape": [1, 2], "sparse_crow_indices": 0, "sparse_col_indices": [0]},
        {"data": [[1.0]], "shape": [1, 2], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
    ],
)
def test_a_tensor_of_another_form_is_refused(tensor: dict[str, object]):
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"weights": tensor}}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "ppo"}}
    with pytest.raises(InputError):
        messages.pass_from_json(body, forward_only=False)


def test_few_bytes_are_not_many_values():
    n = 2**18
    empty = {"data": [], "shape": [n, 256], "sparse_crow_indices": [0] * (n + 1), "sparse_col_indices": []}
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"weights": empty}}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "ppo"}}
    with pytest.raises(InputError):
        messages.pass_from_json(body, forward_only=False)


def test_fields_of_another_kind_are_refused():
    dtype = pb.delimited(3, entry(2, "weights", pb.delimited(2, pb.delimited(3, b"1"))))
    for data in (pb.delimited(1, "m") + pb.delimited(2, b"1"), dtype):
        with pytest.raises(DecodeError):
            messages.pass_from_protobuf(data)
