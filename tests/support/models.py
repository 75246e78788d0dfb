"""Tiny models for tests: the same weights as a Hugging Face folder and as a checkpoint in Tunix's layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shared.models import names
from shared.models.adapter import a_name, b_name, weights_of
from shared.models.families import families
from shared.run.checkpoint_files import (
    Adapter,
    BaseWeights,
    Manifest,
    ManifestLeaf,
    Probe,
    digest_files,
    write_manifest,
)
from shared.types import WeightVersion

Weights = dict[str, np.ndarray]


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a 2-layer Qwen3 with 0.3 M parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "attention_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
    } | overrides


def random_weights(config: Mapping[str, Any], seed: int) -> Weights:
    """float32 weights with Hugging Face's names, large enough that distributions are far from uniform."""
    rng = np.random.default_rng(seed)
    dim, ffn, vocab, head = config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def normal(*shape: int, scale: float = 0.08) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    family = families()[config["model_type"]]
    about = 0 if family.norms_add_one else 1
    weights = {"model.embed_tokens.weight": normal(vocab, dim, scale=0.3), "model.norm.weight": about + normal(dim)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, dim, scale=0.3)
    shapes = {
        "self_attn.q_proj": (q, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q),
    }
    if rank := config.get("kv_lora_rank"):
        shapes = _latent_shapes(config, rank)
    dense = dict[str, tuple[int, ...]]()
    for name, shape in (("gate_proj", (ffn, dim)), ("up_proj", (ffn, dim)), ("down_proj", (dim, ffn))):
        dense[f"mlp.{name}"] = shape
    n = config.get("num_experts") or config.get("n_routed_experts")
    if n:
        ffn = config["moe_intermediate_size"]
        shapes["mlp.gate"] = (n, dim)
        feed_forward = [f"mlp.experts.{i}" for i in range(n)]
        if shared := config.get("shared_expert_intermediate_size"):
            shapes["mlp.shared_expert_gate"] = (1, dim)
            names = (("gate_proj", (shared, dim)), ("up_proj", (shared, dim)), ("down_proj", (dim, shared)))
            shapes |= {f"mlp.shared_expert.{name}": shape for name, shape in names}
        if n_shared := config.get("n_shared_experts"):
            names = {name: tuple(n_shared * s if s == ffn else s for s in shape) for name, shape in _mlp(dim, ffn)}
            shapes |= {f"mlp.shared_experts.{name}": shape for name, shape in names.items()}
    else:
        feed_forward = ["mlp"]
    for prefix in feed_forward:
        shapes |= {f"{prefix}.{name}": shape for name, shape in _mlp(dim, ffn)}
    gains = {"input_layernorm": dim, "post_attention_layernorm": dim}
    if family.qk_norm:
        gains = {"self_attn.q_norm": head, "self_attn.k_norm": head} | gains
    if family.output_norms:
        gains |= {"pre_feedforward_layernorm": dim, "post_feedforward_layernorm": dim}
    biases = {"q_proj": q, "k_proj": kv, "v_proj": kv} if family.qkv_bias else {}
    for name in ("q_lora_rank", "kv_lora_rank"):
        if rank := config.get(name):
            gains[f"self_attn.{name[0] if name[0] == 'q' else 'kv'}_a_layernorm"] = rank
    for layer in range(config["num_hidden_layers"]):
        its = shapes
        if layer < config.get("first_k_dense_replace", 0):
            its = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")} | dense
        elif config.get("n_group"):
            weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = normal(n, scale=0.2)
        for name, shape in its.items():
            scale = 0.3 if name == "mlp.gate" else 0.08
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape, scale=scale)
        for name, size in gains.items():
            weights[f"model.layers.{layer}.{name}.weight"] = about + normal(size)
        for name, size in biases.items():
            weights[f"model.layers.{layer}.self_attn.{name}.bias"] = normal(size, scale=0.5)
    return weights


def _mlp(dim: int, ffn: int) -> list[tuple[str, tuple[int, int]]]:
    return [("gate_proj", (ffn, dim)), ("up_proj", (ffn, dim)), ("down_proj", (dim, ffn))]


def _latent_shapes(config: Mapping[str, Any], rank: int) -> dict[str, tuple[int, ...]]:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    queries = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    of_queries = {"self_attn.q_proj": (queries, dim)}
    if config["q_lora_rank"]:
        of_queries = {
            "self_attn.q_a_proj": (config["q_lora_rank"], dim),
            "self_attn.q_b_proj": (queries, config["q_lora_rank"]),
        }
    return of_queries | {
        "self_attn.kv_a_proj_with_mqa": (rank + config["qk_rope_head_dim"], dim),
        "self_attn.kv_b_proj": (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank),
        "self_attn.o_proj": (dim, heads * config["v_head_dim"]),
    }


def write_hf(folder: Path, config: Mapping[str, Any], weights: Weights | None = None) -> Path:
    """Writes config.json and, if given, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if weights is not None:
        from safetensors.numpy import save_file

        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def to_tunix(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """The same weights under Tunix's names and shapes, flat (`layers.0.attn.q_proj.w`)."""
    found = dict(_tunix_leaf(name, value, config) for name, value in weights.items() if ".experts." not in name)
    n = config.get("num_experts") or config.get("n_routed_experts")
    for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"] if n else 0):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            names = (f"model.layers.{layer}.mlp.experts.{i}.{leaf}.weight" for i in range(n))
            found[f"layers.{layer}.mlp.{leaf}"] = np.stack([weights[name].T for name in names])
    return found


def _tunix_leaf(name: str, value: np.ndarray, config: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    top = {"model.embed_tokens.weight": "embedder.input_embedding", "model.norm.weight": "final_norm.w"}
    if name in top:
        return top[name], value
    if name == "lm_head.weight":
        return "lm_head.w", np.ascontiguousarray(value.T)
    if shared := re.fullmatch(r"model\.(layers\.\d+\.mlp\.shared_expert[\w.]*)\.weight", name):
        return f"{shared[1]}.kernel", np.ascontiguousarray(value.T)
    if name.endswith("e_score_correction_bias"):
        return name.removeprefix("model.").replace("gate.e_score_correction", "router"), value
    if "kv_lora_rank" in config and (own := re.fullmatch(r"model\.(layers\.\d+\.)self_(attn\.\w+)\.weight", name)):
        kind = ".w" if own[2].endswith("norm") else ".kernel"
        return own[1] + own[2] + kind, np.ascontiguousarray(value.T)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)\.(weight|bias)", name)
    assert match, name
    layer, leaf, kind = match.groups()
    if kind == "bias":
        return f"layers.{layer}.attn.{leaf[0]}_bias", value
    if leaf.endswith("layernorm"):
        return f"layers.{layer}.{leaf}.w", value
    if leaf in ("q_norm", "k_norm"):
        return f"layers.{layer}.attn.{leaf}.w", value
    if leaf == "gate":
        return f"layers.{layer}.mlp.router.kernel", np.ascontiguousarray(value.T)
    if leaf in ("gate_proj", "up_proj", "down_proj"):
        return f"layers.{layer}.mlp.{leaf}.kernel", np.ascontiguousarray(value.T)
    heads = config["num_attention_heads"] if leaf in ("q_proj", "o_proj") else config["num_key_value_heads"]
    dim, head = config["hidden_size"], config["head_dim"]
    shape = (heads, head, dim) if leaf == "o_proj" else (dim, heads, head)
    return f"layers.{layer}.attn.{leaf}.w", np.ascontiguousarray(value.T.reshape(shape))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} to {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def save_params(folder: Path, flat: Weights) -> Path:
    """Writes `folder` as an Orbax checkpoint (OCDBT, not compressed) of the nested tree."""
    import orbax.checkpoint as ocp

    tree = nest(flat)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), ocp.args.PyTreeSave(tree), force=True)
    return folder


def random_adapter(config: Mapping[str, Any], seed: int, rank: int = 2) -> Weights:
    """Adapters of every projection of `to_tunix`'s tree, with a B that is not 0."""
    rng, made = np.random.default_rng(seed), Weights()
    for name, value in to_tunix(random_weights(config, 0), config).items():
        if re.search(r"_proj\.(w|kernel)$", name):
            n_in = 2 if name.endswith("o_proj.w") else 1
            a, b = (*value.shape[:n_in], rank), (rank, *value.shape[n_in:])
            made |= {f"{name}_lora_{half}": 0.2 * rng.standard_normal(s) for half, s in (("a", a), ("b", b))}
    return {name: value.astype(np.float32) for name, value in made.items()}


def merged(weights: Weights, tree: Weights, scale: float) -> Weights:
    """Effective weights of adapters on a base, both under the trainer's names, in float64 under Hugging Face's."""
    found = {name: value.astype(np.float64) for name, value in weights.items()}
    for name in weights_of(tree):
        a, b = (tree[of(name)].astype(np.float64) for of in (a_name, b_name))
        found[name] += scale * (a.reshape(-1, a.shape[-1]) @ b.reshape(len(b), -1)).reshape(found[name].shape)
    return {names.hf_name(name): names.to_hf(name, value) for name, value in found.items()}


def write_base(root: Path, config: Mapping[str, Any], weights: Weights) -> BaseWeights:
    """Writes `{root}/base/{digest}/` as the trainer does."""
    flat, draft = to_tunix(weights, config), root / ".draft"
    save_params(draft / "params", flat)
    base = BaseWeights.of(digest_files(draft, "params"), _tree(flat))
    base.folder(root).parent.mkdir(exist_ok=True)
    draft.rename(base.folder(root))
    return base


def write_adapter(
    root: Path, version: str, config: Mapping[str, Any], flat: Weights, adapter: Adapter, probe: Probe | None = None
) -> Path:
    """Writes `{root}/{version}/` with adapters of a base alone. Returns the folder."""
    return _write(root, version, flat, config, kind="adapter", adapter=adapter, probe=probe)


def write_checkpoint(
    root: Path,
    version: str,
    config: Mapping[str, Any],
    weights: Weights,
    *,
    probe: Probe | None = None,
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
    run: str = "test",
) -> Path:
    """Writes `{root}/{version}/` as the trainer does: params, then the manifest. Returns the folder.

    `model` is what the manifest says of the architecture (default: `config`).
    """
    described = config if model is None else model
    return _write(root, version, to_tunix(weights, config), described, run=run, base_version=base, probe=probe)


def _write(root: Path, version: str, flat: Weights, model: Mapping[str, Any], **said: Any) -> Path:
    folder = root / version
    folder.mkdir(parents=True)
    save_params(folder / "params", flat)
    plain = {"run": "test", "base_version": None, "kind": "full", "path": "params", "created": 0.0}
    step, files = WeightVersion.parse(version).step, digest_files(folder, "params")
    manifest = Manifest(
        **plain | {"version": version, "step": step, "files": files, "tree": _tree(flat)} | said, model=model
    )
    write_manifest(folder, manifest)
    return folder


def _tree(flat: Weights) -> tuple[ManifestLeaf, ...]:
    return tuple(ManifestLeaf(key, tuple(value.shape), str(value.dtype)) for key, value in sorted(flat.items()))
