"""Convert a GGUF file of a Llama model to a Hugging Face folder.

`volley model get` runs `python -m services.trainer.models.gguf FILE.gguf FOLDER` with the package gguf on its path. The
tokenizer must be of the kind `gpt2` (byte-level BPE).

The folder holds config.json, model.safetensors (bfloat16, dequantized), tokenizer.json, tokenizer_config.json,
chat_template.jinja and generation_config.json.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.errors import ConfigError, VolleyError, problem

_CONTROL = 3  # a token's type: special
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Pre-tokenizers by `tokenizer.ggml.pre`. SmolLM2 splits digits.
_CUTS = {"smollm": [pre_tokenizers.Digits(individual_digits=True)]}


def convert(file: Path, folder: Path) -> None:
    """Write the folder. Raises ConfigError for an unsupported file."""
    import gguf  # pyrefly: ignore[missing-import]  # `volley model get` puts it on the path

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a GGUF file: {error}", "download it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (kind := fields.get("general.architecture")) != "llama":
        raise ConfigError(f"{file} holds a model of the architecture {kind!r}", "only llama is converted")
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = config_of(fields, tied="output.weight" not in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(tensors, config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    settings = {name.removesuffix("_id"): tokens[token] for name, token in ids.items()}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def config_of(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Make config.json from the file's metadata. Padding is not the end token, because ends of turns are learned."""
    eos, unknown = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "unknown"))
    padding = fields.get("tokenizer.ggml.padding_token_id", eos)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": unknown if padding == eos else padding,
        "torch_dtype": "bfloat16",
    }


def weights_of(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Convert to Hugging Face's tensors, bfloat16. Raises ConfigError for an unknown tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is not None and match[2] in _BLOCK:
            value = _unpermuted(value, heads[match[2]]) if match[2] in heads else value
            target = f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"
        elif name in _TOP:
            target = _TOP[name]
        else:
            raise ConfigError(f"the GGUF file has a tensor {name} that no Llama model has", "it cannot be converted")
        found[target] = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)
    return found


def _unpermuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Put the two halves of every head one after the other; llama.cpp's converter interleaves them. [out, in]."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, value.shape[1])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def tokenizer_of(fields: Mapping[str, Any]) -> Tokenizer:
    """Make the byte-level BPE tokenizer. Raises ConfigError for a tokenizer of another kind."""
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _CUTS:
        raise ConfigError(f"the tokenizer of the GGUF file is of the kind {kind!r}, {pre!r}", "it cannot be converted")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    cuts = [*_CUTS[pre], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(t, special=True, normalized=False) for t, n in zip(tokens, types, strict=True) if n == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def main(arguments: list[str]) -> int:
    """Print the result or a problem as a JSON object; return the exit code."""
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except VolleyError as error:
        _print_json(problem(error))
        return 2
    _print_json({"ok": True})
    return 0


def _print_json(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
