"""Conversion of a GGUF file to a Hugging Face folder.

The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
chat_template.jinja. Weights are float32 if the file's matrices are float32 or float16, so they stay exact; of any other
file they are dequantized to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import orjson
from safetensors.numpy import save_file

from shared.errors import ConfigError
from shared.models.config import CONFIG, GENERATION_CONFIG, ModelConfig
from shared.models.names import from_hf, hf_name, in_files, is_experts
from shared.models.parameters import parameters
from shared.models.weight_files import WEIGHTS
from volley_convert.gguf.metadata import Metadata, config_of, generation_of, token_ids
from volley_convert.gguf.tokenizer import tokenizer_of

_MAGIC, _HEADER = b"GGUF", 8
_EXACT = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
_FACTORS = "rope_freqs.weight"
_AGAIN = "it is damaged, or its download was cut off: download it again"


def convert(file: Path, folder: Path) -> list[str]:
    """Write the folder; return the names of quantizations. Raises ConfigError for a damaged or unsupported file."""
    reader = _opened(file)
    metadata = Metadata.read(reader, file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if not tensors:
        raise ConfigError(f"{file} holds a vocabulary, but no weights", "name the GGUF file of the whole model")
    factors = tensors.pop(_FACTORS, None)
    config = config_of(
        metadata,
        tied="output.weight" not in tensors,
        factors=None if factors is None else np.array(_array(factors), np.float64),
    )
    dtype = weights_dtype(tensors)
    model = ModelConfig.parse(config, str(file))
    weights = weights_of(tensors, model, metadata, dtype)
    tokenizer = tokenizer_of(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata.of("tokenizer.ggml.tokens")
    special = {name.removesuffix("_id"): tokens[token] for name, token in token_ids(metadata).items()}
    if metadata.get("tokenizer.ggml.model") == "llama":
        special["unk_token"] = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    _write(folder / CONFIG, config | {"torch_dtype": np.dtype(dtype).name})
    _write(folder / GENERATION_CONFIG, generation_of(metadata))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return sorted({one.tensor_type.name for one in tensors.values()} - {"F32", "F16", "BF16"})


def _opened(file: Path) -> Any:
    """Open the file. Raises ConfigError for another format, another byte order, or one that ends early."""
    try:
        with file.open("rb") as data:
            header = data.read(_HEADER)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if header[:4] != _MAGIC:
        raise ConfigError(f"{file} is no GGUF file: it begins with {header[:4]!r}", "name a GGUF file")
    if len(header) == _HEADER and not int.from_bytes(header[4:], "little") & 0xFFFF:
        raise ConfigError(
            f"{file} is a GGUF file for big-endian machines", "convert it with gguf's gguf_convert_endian.py little"
        )
    try:
        return gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError(f"{file} cannot be read as a GGUF file: {error}", _AGAIN) from error


def weights_dtype(tensors: Mapping[str, Any]) -> Any:
    """Return the dtype in which no floating-point weight of the file is rounded, or bfloat16."""
    return np.float32 if all(one.tensor_type in _EXACT for one in tensors.values()) else ml_dtypes.bfloat16


def weights_of(tensors: Mapping[str, Any], model: ModelConfig, metadata: Metadata, dtype: Any) -> dict[str, np.ndarray]:
    """Convert to the tensors of Hugging Face's files. Raises ConfigError for missing, unknown or misshapen tensors."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == metadata.architecture)
    known = gguf.get_tensor_name_map(kind, model.num_hidden_layers)
    left, found = dict(tensors), dict[str, np.ndarray]()
    for leaf, described in parameters(model).items():
        name = hf_name(leaf)
        module, _, suffix = name.rpartition(".")
        tensor = left.pop(f"{known.get_name(module)}.{suffix}", None)
        if tensor is None:
            raise ConfigError(f"{metadata.file} lacks the tensor of {name}", "is it a whole model?")
        value = _as_trained(leaf, _array(tensor), model, interleaved=metadata.architecture == "llama")
        try:
            from_hf(leaf, value, described.shape)
        except ValueError as error:
            raise ConfigError(f"{metadata.file}: {error}", "its metadata and its tensors do not fit") from error
        value = np.ascontiguousarray(value).astype(dtype)
        found |= dict(zip(in_files(name, len(value)), value, strict=True)) if is_experts(leaf) else {name: value}
    if left:
        raise ConfigError(
            f"{metadata.file} has a tensor {min(left)} that no {model.family.title} model has", "it cannot be converted"
        )
    return found


def _array(tensor: Any) -> np.ndarray:
    """Dequantize to float32, in Hugging Face's orientation."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _as_trained(leaf: str, value: np.ndarray, model: ModelConfig, *, interleaved: bool) -> np.ndarray:
    """Undo the changes of llama.cpp's converter: norms that include their 1, Llama's turned pairs, a lost dimension."""
    if model.family.norms_add_one and leaf.endswith("norm.w"):
        return value - 1
    if interleaved and leaf.endswith(("attn.q_proj.w", "attn.k_proj.w")):
        heads = model.num_attention_heads if leaf.endswith("q_proj.w") else model.num_key_value_heads
        return unpermuted(value, heads)
    if leaf.endswith("shared_expert_gate.kernel"):
        return value.reshape(1, -1)
    return value


def unpermuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Put the two halves of every head one after the other; llama.cpp's converter interleaves them. [out, in]."""
    if value.ndim != 2 or value.shape[0] % (2 * heads):
        return value  # its shape is refused
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, value.shape[1])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
