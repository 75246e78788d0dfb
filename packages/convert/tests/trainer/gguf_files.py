"""GGUF files of small models with trained tokenizers, written as llama.cpp's converter does."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.models.names import of_expert
from tests.support.models import Weights

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that splits text into words: Qwen2's, and with up to three digits a word Llama 3's."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Hello world, it's 2026 and the lake's frozen.",
    "  two spaces,   three\n\n\nlines\t\ttabs  ",
    "def f(x):\n    return x**2  # don't\r\n",
    "Größe café naïve Ångström 東京 🚀 𝔘 \u200d é",
    "12345678 3.14159 a1b22c333d4444",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
    "the the THE thE_the-the\u00a0the",
]
_CORPUS = [text for text in TEXTS for _ in range(20)] + [
    "the agent crosses the frozen lake and returns the reward of the episode to the trainer",
    "the trainer reads the group of episodes and publishes the weights to the servers",
    "it's what they've said: don't step where the ice isn't frozen, we'll see in 2026 or 12345",
] * 40
_TYPES = gguf.GGMLQuantizationType


@cache
def byte_level(pre: str) -> Tokenizer:
    """A tokenizer like the one whose text is cut by `pre`, as its authors publish it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    cuts = {
        "qwen2": pre_tokenizers.Split(Regex(WORDS.format("")), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(WORDS.format("{1,3}")), "isolated"),
        "smollm": pre_tokenizers.Digits(individual_digits=True),
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts[pre], level]) if pre in cuts else level
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


@cache
def pieces(*, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece's model with bytes for unknown letters; with `prefix` it puts a space before a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS * 2),
        model_writer=model,
        model_type="bpe",
        vocab_size=450,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def fields_of_byte_level(pre: str) -> dict[str, Any]:
    """`tokenizer.ggml.*` of this tokenizer, without that prefix."""
    import json

    tokenizer = byte_level(pre)
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))],
        "merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
        "padding_token_id": tokens.index("<|endoftext|>"),
        "bos_token_id": tokens.index("<|endoftext|>"),
        "add_bos_token": False,
    }


def fields_of_pieces(*, prefix: bool) -> dict[str, Any]:
    """The same of SentencePiece's model."""
    model = pieces(prefix=prefix)
    ids = range(model.vocab_size())
    kinds = {i: 3 if model.is_control(i) else 2 if model.is_unknown(i) else 6 if model.is_byte(i) else 1 for i in ids}
    kinds |= {model.piece_to_id(text): 4 for text in ("<start_of_turn>", "<end_of_turn>")}
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": list(kinds.values()),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_space_prefix": prefix,
        "add_bos_token": True,
    }


def fields_of_model(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the architecture, from a config.json."""
    keys = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base": "rope_theta",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    found = {f"{architecture}.{key}": config[name] for key, name in keys.items() if config.get(name) is not None}
    if architecture == "llama":
        found["llama.rope.dimension_count"] = config["head_dim"]
    return found


def write(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    weights: Weights,
    tokenizer: Mapping[str, Any],
    kind: str = "F32",
    **changes: Any,
) -> Path:
    """Write the file with matrices of a `kind`, norms and biases in float32. `changes` replace keys, or with None drop
    them. Raises as gguf does.
    """
    writer = gguf.GGUFWriter(path, architecture)
    fields = fields_of_model(architecture, config) | {f"tokenizer.ggml.{key}": v for key, v in tokenizer.items()}
    for key, value in (fields | changes).items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors(architecture, config, weights).items():
        _add_tensor(writer, name, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(architecture: str, config: Mapping[str, Any], weights: Weights) -> Weights:
    """Tensors by GGUF's names, as llama.cpp's converter changes them.

    It has a `permute` of Llama's heads, norms with their 1, and stacked experts.
    """
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found, stacks = Weights(), dict[str, list[np.ndarray]]()
    for name, value in weights.items():
        module, _, suffix = name.rpartition(".")
        if expert := of_expert(name):
            stacks.setdefault(f"{names.get_name(expert[0].removesuffix('.weight'))}.weight", []).append(value)
            continue
        if module.endswith("shared_expert_gate"):
            value = value[0]
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
            value = value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if architecture.startswith("gemma") and module.endswith("norm"):
            value = value + 1
        found[f"{names.get_name(module)}.{suffix}"] = value
    return found | {name: np.stack(values) for name, values in stacks.items()}


def _add_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: str) -> None:
    if value.ndim == 1 or kind == "F32" or name.endswith("ffn_gate_inp.weight"):
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    elif kind == "F16":
        writer.add_tensor(name, value.astype(np.float16))
    elif kind == "Q4_K":
        writer.add_tensor(name, _random_q4_k(name, value.shape), raw_dtype=_TYPES.Q4_K)
    else:
        writer.add_tensor(name, gguf.quants.quantize(value, _TYPES[kind]), raw_dtype=_TYPES[kind])


def _random_q4_k(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 256 weights with random bytes, which gguf reads but does not write: two float16 scales, then 140 bytes.

    uint8 [..., 144 · blocks]
    """
    rng = np.random.default_rng(list(name.encode()))
    blocks = (*shape[:-1], shape[-1] // 256)
    scales = np.stack([np.full(blocks, 2e-4, np.float16), np.full(blocks, 1.5e-3, np.float16)], -1).view(np.uint8)
    rest = rng.integers(0, 256, (*blocks, 140), np.uint8)
    return np.concatenate([scales, rest], -1).reshape(*shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind, inner = _type_of(value), None
    if isinstance(value, list):
        inner = gguf.GGUFValueType.FLOAT32 if isinstance(value[0], float) else _type_of(value[0])
    writer.add_key_value(key, value, kind, sub_type=inner)


def _type_of(value: Any) -> gguf.GGUFValueType:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        list: gguf.GGUFValueType.ARRAY,
    }
    return kinds[type(value)]
