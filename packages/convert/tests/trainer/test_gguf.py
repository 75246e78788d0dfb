"""Conversion of GGUF files, against transformers' own reading of the same file and the tokenizers they were made of."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file

from packages.convert.tests.trainer import gguf_files
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.rope import Llama3Scaling, frequencies
from shared.models.tokenizer_files import read_tokenizer
from tests.support import models
from tests.support.torch_client import Torch
from tests.trainer.test_families import load, logprobs
from volley_convert.gguf import __main__ as program
from volley_convert.gguf.conversion import convert
from volley_convert.gguf.metadata import Metadata, token_ids
from volley_convert.gguf.metadata import config_of as config_of_file
from volley_convert.gguf.tokenizer import tokenizer_of

IDS = np.random.default_rng(0).integers(3, 400, 40).astype(np.int32)
SIZES = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 256}
GEMMA = SIZES | {
    "head_dim": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 7,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 128}
SHARED = {"shared_expert_intermediate_size": 512, "head_dim": 64}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (SIZES | {"model_type": "llama", "head_dim": 64}, gguf_files.fields_of_pieces(prefix=True)),
    "qwen2": (SIZES | {"model_type": "qwen2", "head_dim": 64}, gguf_files.fields_of_byte_level("qwen2")),
    "qwen3": (SIZES | {"model_type": "qwen3", "head_dim": 128}, gguf_files.fields_of_byte_level("qwen2")),
    "qwen2moe": (EXPERTS | SHARED | {"model_type": "qwen2_moe"}, gguf_files.fields_of_byte_level("qwen2")),
    "qwen3moe": (EXPERTS | {"model_type": "qwen3_moe"}, gguf_files.fields_of_byte_level("qwen2")),
    "gemma2": (GEMMA | {"model_type": "gemma2", "rope_theta": 1e4}, gguf_files.fields_of_pieces(prefix=False)),
    "gemma3": (GEMMA | {"model_type": "gemma3_text"}, gguf_files.fields_of_pieces(prefix=False)),
}
"""config.json and tokenizer by architecture; transformers takes the head_dim of Gemma and Qwen3 for granted."""

UNREAD = ("moe_intermediate_size", "shared_expert_intermediate_size")
"""Sizes that transformers does not read from every file."""
SHORT = [("llama", "F32"), ("qwen2", "Q4_K"), ("qwen3", "F16"), ("qwen2moe", "Q8_0"), ("gemma3", "Q8_0")]


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    config, tokenizer = CASES[architecture]
    return models.tiny_config(architectures=None, vocab_size=len(tokenizer["tokens"])) | config | changes


def write(path: Path, architecture: str = "qwen2", kind: str = "F32", **changes: Any) -> tuple[Path, models.Weights]:
    """The file, and the weights that it was made of."""
    config = config_of(architecture)
    weights = models.random_weights(config, 1)
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name] *= np.float32(0.1)  # log-probabilities of a trained model's size, which float32 holds to 1e-6
    return gguf_files.write(path, architecture, config, weights, CASES[architecture][1], kind, **changes), weights


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the package gguf alone, which is pure Python, for the environment of torch."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(library.__file__).parents[1].glob("gguf*"):
        (folder / path.name).symlink_to(path)
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product(CASES, ("F32", "F16", "Q8_0", "Q4_K"))
    ],
)
def test_a_file_is_read_as_transformers_reads_it(
    architecture: str, kind: str, torch: Torch, packages: str, tmp_path: Path
) -> None:
    """Token ids, and log-probabilities of the trainer in float32."""
    file, weights = write(tmp_path / "m.gguf", architecture, kind)
    quantizations = convert(file, folder := tmp_path / "hf")
    assert quantizations == ([] if kind[0] == "F" else [kind])
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert {value.dtype.name for value in found.values()} == {"float32" if kind[0] == "F" else "bfloat16"}
    if kind == "F32":
        assert all(np.allclose(found[name], value, rtol=0, atol=1e-7) for name, value in weights.items())
    known = torch.ask(
        "gguf",
        packages=packages,
        file=str(file),
        config={key: value for key, value in config_of(architecture).items() if key in UNREAD},
        rounded=kind[0] == "Q",
        ids=IDS.tolist(),
        texts=gguf_files.TEXTS,
    )
    np.testing.assert_allclose(logprobs(load(folder), IDS), known["logprobs"], atol=5e-6)
    tokenizer = read_tokenizer(folder).tokenizer
    for i, text in enumerate(gguf_files.TEXTS):
        if architecture == "llama" and text.startswith(" "):
            continue  # SentencePiece puts a space before this text too, transformers does not
        assert tokenizer.encode(text, add_special_tokens=False).ids == known[f"ids {i}"].tolist(), text


# Tokenizers


def metadata(fields: dict[str, Any], architecture: str = "llama", **changes: Any) -> Metadata:
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return Metadata(Path("m.gguf"), architecture, prefixed | changes)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "smollm", "gpt-2"])
def test_words_are_cut_as_the_published_tokenizer_cuts_them(pre: str) -> None:
    """transformers reads Llama 3's and SmolLM2's files with GPT-2's words."""
    made, published = tokenizer_of(metadata(gguf_files.fields_of_byte_level(pre))), gguf_files.byte_level(pre)
    for text in gguf_files.TEXTS:
        assert made.encode(text).ids == published.encode(text).ids, text
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == published.decode(
            published.encode(text).ids, skip_special_tokens=False
        )
    (call,) = made.encode("<tool_call>").tokens
    assert call == "<tool_call>"
    assert {token.content for token in made.get_added_tokens_decoder().values() if token.special} == {
        *gguf_files.SPECIAL
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_those_of_sentencepiece(prefix: bool) -> None:
    made, published = (
        tokenizer_of(metadata(gguf_files.fields_of_pieces(prefix=prefix))),
        gguf_files.pieces(prefix=prefix),
    )
    for text in gguf_files.TEXTS:
        first, *ids = made.encode(text).ids
        assert (first, ids) == (published.bos_id(), published.encode(text)), text
        assert made.decode(ids) == published.decode(ids)


def test_unknown_kinds_of_tokenizers_are_refused() -> None:
    fields = gguf_files.fields_of_byte_level("qwen2")
    for change in ({"model": "bert"}, {"pre": "tekken"}):
        with pytest.raises(ConfigError, match=r"m\.gguf: its tokenizer is of the kind"):
            tokenizer_of(metadata(fields | change))


# Settings


def test_every_end_of_a_turn_and_the_advised_sampling_are_kept(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    file, _ = write(tmp_path / "m.gguf", **more, **{"tokenizer.chat_template": "{{ messages }}"})
    convert(file, folder := tmp_path / "hf")
    made = orjson.loads((folder / "generation_config.json").read_bytes())
    eos = CASES["qwen2"][1]["eos_token_id"]
    assert (made["eos_token_id"], made["temperature"], made["top_k"]) == ([eos, 5], 0.7, 20)
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"
    assert ModelConfig.read(folder).eos_token_ids == (5, eos)


def test_padding_ends_no_turn() -> None:
    """SmolLM2's file pads with the end token."""
    ids = token_ids(
        metadata({"tokens": ["a", "b", "c"], "eos_token_id": 2, "padding_token_id": 2, "unknown_token_id": 0})
    )
    assert ids == {"eos_token_id": 2, "pad_token_id": 0}
    assert token_ids(metadata({"tokens": ["a", "b"], "eos_token_id": 1})) == {"eos_token_id": 1}


def test_the_scaling_of_llama_3_is_found_from_its_factors(tmp_path: Path) -> None:
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    factors = frequencies(500000.0, 64, None) / frequencies(500000.0, 64, scaling)
    config = {**config_of("llama"), "rope_theta": 500000.0}
    fields = gguf_files.fields_of_model("llama", config)
    described = metadata(CASES["llama"][1], **fields)
    made = ModelConfig.parse(config_of_file(described, tied=False, factors=factors.astype(np.float32)))
    assert made.rope_scaling == scaling
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        config_of_file(described, tied=False, factors=factors * np.linspace(1, 2, 32))


# Bad input


def refused(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The problem of the program, which has written no folder."""
    assert program.main([str(file), str(folder)]) == 2
    assert not folder.exists()
    return orjson.loads(capsys.readouterr().out)["detail"]


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.5, 0.9, 0.9999])
def test_a_cut_file_is_refused(share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = write(tmp_path / "m.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert "cannot be read as a GGUF file" in refused(file, tmp_path / "hf", capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "falcon"}, "a model of the architecture 'falcon'"),
        ({"qwen2.expert_count": 8}, "a qwen2 model with experts, such as Mixtral"),
        ({"split.count": 3, "split.no": 0}, "is one of 3 parts of a model"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"qwen2.block_count": 1}, "has a tensor blk.1."),
        ({"qwen2.block_count": 3}, "lacks the tensor of model.layers.2."),
        ({"qwen2.feed_forward_length": 512}, "has shape [256, 256], which does not fit"),
        ({"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}, "rope_scaling.rope_type='yarn'"),
        ({"qwen2.rope.dimension_count": 32}, "partial_rotary_factor=0.5"),
        ({"qwen2.attention.sliding_window": 128}, "use_sliding_window=True"),
        ({"qwen2.embedding_length": None}, "lacks the key qwen2.embedding_length"),
        ({"tokenizer.ggml.tokens": None}, "lacks the key tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is outside its vocabulary"),
    ],
)
def test_other_files_are_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = write(tmp_path / "m.gguf", **changes)
    assert said in refused(file, tmp_path / "hf", capsys)


def test_a_vocabulary_and_other_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tokenizer = config_of("qwen2"), CASES["qwen2"][1]
    file = gguf_files.write(tmp_path / "m.gguf", "qwen2", config, models.Weights(), tokenizer)
    assert "holds a vocabulary, but no weights" in refused(file, tmp_path / "hf", capsys)
    header = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    for content, said in ((header, "big-endian"), (b"PK\x03\x04 zip", "begins with b'PK"), (b"", "begins with b''")):
        file.write_bytes(content)
        assert said in refused(file, tmp_path / "hf", capsys)
