"""Layouts of model folders: those that people have, damaged ones among them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.support import models

FIXTURES = Path(__file__).parents[1] / "fixtures" / "model_folders"
CONFIG = models.tiny_config(vocab_size=24, hidden_size=16, intermediate_size=24, head_dim=8)
TIED = CONFIG | {"tie_word_embeddings": True}
NEW, OLD = models.random_weights(CONFIG, 1), models.random_weights(CONFIG, 2)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
INDEX = "model.safetensors.index.json"
type Layout = Callable[[Path], None]


def single(folder: Path, weights: models.Weights = NEW, config: Mapping[str, Any] = CONFIG) -> None:
    models.write_hf(folder, config, weights)


def shards(folder: Path, weights: models.Weights = NEW, n: int = 2, *, config: Mapping[str, Any] = CONFIG) -> None:
    models.write_hf(folder, config)
    names, where = sorted(weights), {}
    for i in range(n):
        file = f"model-0000{i + 1}-of-0000{n}.safetensors"
        save_file({name: weights[name] for name in names[i::n]}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[i::n], file)
    write_index(folder, where)


def write_index(folder: Path, where: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": dict(where)}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def beside(name: str, *, weights: models.Weights = OLD) -> Layout:
    """Another file of tensors beside valid weights."""

    def layout(folder: Path) -> None:
        single(folder)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return layout


def only(name: str, content: bytes | None = None) -> Layout:
    """Weights under this name alone; `content` None is those of a valid file of tensors."""

    def layout(folder: Path) -> None:
        models.write_hf(folder, CONFIG)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            save_file(NEW, folder / name, metadata={"format": "pt"})
        else:
            (folder / name).write_bytes(content)

    return layout


def changed(change: Callable[[models.Weights], models.Weights], config: Mapping[str, Any] = CONFIG) -> Layout:
    return lambda folder: single(folder, change(dict(NEW)), config)


def of_dtype(dtype: Any) -> Layout:
    return changed(lambda weights: {name: value.astype(dtype) for name, value in weights.items()})


def stale_shards(folder: Path) -> None:
    shards(folder, OLD, 3)
    shards(folder, NEW, 2)


def both(folder: Path) -> None:
    shards(folder, OLD)
    single(folder, NEW)


def lacking_shards(*names: str) -> Layout:
    def layout(folder: Path) -> None:
        shards(folder)
        for name in names:
            (folder / name).unlink()

    return layout


def shards_below(folder: Path) -> None:
    shards(folder)
    (folder / "parts").mkdir()
    for file in folder.glob("*.safetensors"):
        file.rename(folder / "parts" / file.name)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    write_index(folder, {name: f"parts/{file}" for name, file in index["weight_map"].items()})


def twice(folder: Path) -> None:
    """The second shard holds a tensor of the first one, with other values."""
    shards(folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    names = [name for name, file in index.items() if file.startswith("model-00002")]
    doubled = next(name for name in index if name not in names)
    tensors = {name: NEW[name] for name in names} | {doubled: OLD[doubled]}
    save_file(tensors, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})


def not_in_the_index(folder: Path) -> None:
    """The index leaves out a tensor that lies in one of its shards."""
    shards(folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    write_index(folder, {name: file for name, file in index.items() if name != "model.norm.weight"})


def damaged_index(folder: Path) -> None:
    shards(folder)
    (folder / INDEX).write_text("{", encoding="utf-8")


def pointers(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(LFS)


def cut_off(folder: Path) -> None:
    single(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def broken_link(folder: Path) -> None:
    models.write_hf(folder, CONFIG)
    (folder / "model.safetensors").symlink_to(folder / "gone")


def broken_link_and_shards(folder: Path) -> None:
    shards(folder)
    (folder / "model.safetensors").symlink_to(folder / "gone")


def adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}), encoding="utf-8")
    save_file(models.random_adapter(CONFIG, 0), folder / "adapter_model.safetensors")


def adapters_alone(folder: Path) -> None:
    models.write_hf(folder, CONFIG)
    adapters(folder)


def adapters_beside(folder: Path) -> None:
    """With peft, transformers loads the base that they name, and not these weights."""
    single(folder)
    base = folder / "base"
    single(base, OLD)
    said = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base), "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"task_type": "CAUSAL_LM"}), encoding="utf-8")
    pairs = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{half}.weight": np.ones(shape, np.float32)
        for i in range(CONFIG["num_hidden_layers"])
        for half, shape in (("A", (2, 16)), ("B", (32, 2)))
    }
    save_file(pairs, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def without(*names: str) -> Callable[[models.Weights], models.Weights]:
    return lambda weights: {name: value for name, value in weights.items() if name not in names}


def transposed(weights: models.Weights) -> models.Weights:
    name = "model.layers.0.self_attn.q_proj.weight"
    return weights | {name: np.ascontiguousarray(weights[name].T)}


def beside_it(prefix: str, *names: str) -> Callable[[models.Weights], models.Weights]:
    """Other weights under the names of these parameters, with another prefix than "model."."""
    return lambda weights: weights | {prefix + name.removeprefix("model."): OLD[name] for name in names}


def with_dtype(dtype: str, width: int) -> Layout:
    """A matrix in numbers of a type that numpy has not: its bytes are zeros."""

    def layout(folder: Path) -> None:
        single(folder)
        file = folder / "model.safetensors"
        data = file.read_bytes()
        n = int.from_bytes(data[:8], "little")
        header, at, body = json.loads(data[8 : 8 + n]), 0, b""
        for name, said in header.items():
            if name == "__metadata__":
                continue
            start, end = said["data_offsets"]
            content = data[8 + n + start : 8 + n + end]
            if name == FFN:
                said["dtype"], content = dtype, bytes(len(content) // 4 * width)
            said["data_offsets"], body, at = [at, at + len(content)], body + content, at + len(content)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + body)

    return layout


HEAD, EMBEDDINGS, FFN = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
LAYOUTS: Mapping[str, Layout] = {
    "model.safetensors": single,
    "an index with its shards": shards,
    "model.safetensors beside an index of others": both,
    "stale shards of an earlier save": stale_shards,
    "shards in a folder below, as the index says": shards_below,
    **{
        f"{name} beside model.safetensors": beside(name)
        for name in ("model_ema.safetensors", "old_model.safetensors", "consolidated.safetensors")
    },
    "model.fp16.safetensors beside model.safetensors": beside("model.fp16.safetensors"),
    "adapter_model.safetensors beside model.safetensors": beside("adapter_model.safetensors"),
    "a broken link beside an index with its shards": broken_link_and_shards,
    "float16": of_dtype(np.float16),
    "bfloat16": of_dtype(ml_dtypes.bfloat16),
    "float64": of_dtype(np.float64),
    "an unknown tensor": changed(lambda w: w | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
    "inv_freq": changed(lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}),
    "more layers than config.json names": changed(dict, CONFIG | {"num_hidden_layers": 1}),
    "tied, lm_head stored too": changed(lambda w: w | {HEAD: w[EMBEDDINGS]}, TIED),
    "tied, lm_head left out": changed(without(HEAD), TIED),
    "an index that leaves out a tensor of a shard": not_in_the_index,
    # what transformers loads in part, or in another way in another version
    "tied, lm_head differs": changed(dict, TIED),
    "tied, the embeddings left out": changed(without(EMBEDDINGS), TIED),
    "lm_head left out": changed(without(HEAD)),
    "a matrix left out": changed(without(FFN)),
    "a tensor in two shards": twice,
    "a matrix in integers": changed(lambda w: w | {FFN: w[FFN].astype(np.int32)}),
    "names without model.": changed(lambda w: {name.removeprefix("model."): value for name, value in w.items()}),
    "adapters of another base beside model.safetensors": adapters_beside,
    "another file named in config.json": lambda folder: (
        single(folder, NEW, CONFIG | {"transformers_weights": "old.safetensors"}),
        save_file(OLD, folder / "old.safetensors", metadata={"format": "pt"}),
    )[0],
    # what transformers reads as one parameter: the first in alphabetical order counts
    "all with and without model.": changed(beside_it("", *(name for name in NEW if name.startswith("model.")))),
    "a matrix with and without model.": changed(beside_it("", QUERY)),
    "the norm with and without model.": changed(beside_it("", NORM)),
    "the embeddings with and without model.": changed(beside_it("", EMBEDDINGS)),
    "a matrix with model.model.": changed(beside_it("model.model.", QUERY)),
    "the norm with model.model.": changed(beside_it("model.model.", NORM)),
    "lm_head with and without model.": changed(beside_it("model.", HEAD)),
    "tied, another lm_head with model.": changed(lambda w: beside_it("model.", HEAD)(without(HEAD)(w)), TIED),
    "lm_head with model. only": changed(lambda w: without(HEAD)(w) | {"model.lm_head.weight": w[HEAD]}),
    "a matrix without model.": changed(lambda w: without(QUERY)(w) | {QUERY.removeprefix("model."): w[QUERY]}),
    **{
        f"a matrix also under {prefix}": changed(beside_it(prefix, QUERY))
        for prefix in ("transformer.", "base_model.model.model.", "module.model.", "model.language_model.")
    },
    "the norm's old name": changed(lambda w: without(NORM)(w) | {"model.norm.gamma": w[NORM]}),
    "the norm's old name beside": changed(lambda w: w | {"model.norm.gamma": OLD[NORM]}),
    "an empty tensor beside": changed(lambda w: w | {"empty": np.zeros((0, 2), np.float32)}),
    "tied, lm_head of another shape": changed(lambda w: w | {HEAD: w[HEAD][:-1]}, TIED),
    "a matrix in int8": changed(lambda w: w | {FFN: (w[FFN] * 100).astype(np.int8)}),
    "a matrix of booleans": changed(lambda w: w | {FFN: w[FFN] > 0}),
    "a matrix in float8": with_dtype("F8_E4M3", 1),
    "a matrix in complex64": with_dtype("C64", 8),
    "an empty matrix": changed(lambda w: w | {FFN: w[FFN][:0]}),
    "a scalar norm": changed(lambda w: w | {NORM: np.ones((), np.float32)}),
    "the norm as a matrix": changed(lambda w: w | {NORM: w[NORM][None]}),
    "a flat matrix": changed(lambda w: w | {QUERY: w[QUERY].reshape(-1)}),
    # what transformers refuses
    "an empty folder": lambda folder: models.write_hf(folder, CONFIG) and None,
    "an index without shards": lacking_shards("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "an index with one of two shards": lacking_shards("model-00002-of-00002.safetensors"),
    "a damaged index": damaged_index,
    "a file that was cut off": cut_off,
    "a broken link": broken_link,
    "a matrix transposed": changed(transposed),
    "a matrix of another shape": changed(lambda w: w | {FFN: w[FFN][:-1]}),
    "Git LFS pointers for shards": pointers,
    "a Git LFS pointer": only("model.safetensors", LFS),
    "an empty file": only("model.safetensors", b""),
    "model_ema.safetensors alone": only("model_ema.safetensors"),
    "model.fp16.safetensors alone": only("model.fp16.safetensors"),
    "consolidated.safetensors alone": only("consolidated.safetensors"),
    "consolidated.00.pth alone": only("consolidated.00.pth", b"PK"),
    "shards without an index": lambda folder: (shards(folder), (folder / INDEX).unlink())[1],
    "weights in a folder below": only("weights/model.safetensors"),
    "model.gguf alone": only("model.gguf", b"GGUF"),
    "a download in progress": only("model.safetensors.incomplete", b"x"),
    "a download of huggingface_hub in progress": only(".cache/huggingface/download/x.incomplete", b"x"),
    "adapters alone": adapters_alone,
    "pytorch_model.bin alone": only("pytorch_model.bin", b"PK"),
}
