"""Independent float64 numpy forward of Hugging Face's families, written from the
papers' equations and config.json only. Which of them it is, the weights say: norms of queries and keys, biases, routers
to experts, or norms on both sides of the feed-forward part.

Weights are a flat dict with Hugging Face's names and orientation ([out, in] for linear layers). Nothing here imports
JAX, so an error in the engine or in the trainer cannot hide in a shared primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
Config = Mapping[str, Any]
Round = Callable[[np.ndarray], np.ndarray]


def _exact(x: np.ndarray) -> np.ndarray:
    return x


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float64 values rounded to the nearest that bfloat16 holds."""
    import ml_dtypes

    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def _frequencies(config: Config, *, local: bool) -> np.ndarray:
    """float64 [head_dim / 2]: theta^(-2i/d), scaled one by one as Llama 3.1 does where the config asks for it; in
    `local` layers of Gemma 3 with their own theta.
    """
    dim, scaling = config["head_dim"], config.get("rope_scaling")
    theta = config.get("rope_local_base_freq", config["rope_theta"]) if local else config["rope_theta"]
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    return np.array([f if scaling is None else _llama3(f, scaling) for f in plain])


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * np.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _rope(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """x: [T, heads, head_dim]; rotates the two halves of every head by position * frequency."""
    length, _, dim = x.shape
    angles = np.outer(np.arange(length), frequencies)[:, None, :]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _attention(
    x: np.ndarray,
    w: dict[str, np.ndarray],
    prefix: str,
    config: Config,
    keep: Round,
    window: int | None = None,
    about: int = 0,
) -> np.ndarray:
    """With a `window` a token sees so many, itself among them; norms multiply by `about` + weight."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    frequencies, eps, length = _frequencies(config, local=window is not None), config["rms_norm_eps"], len(x)
    q, k, v = (
        keep(x @ w[f"{prefix}{name}_proj.weight"].T + w.get(f"{prefix}{name}_proj.bias", 0.0)).reshape(length, n, dim)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if f"{prefix}q_norm.weight" in w:
        q, k = (keep(_rms(t, about + w[f"{prefix}{n}_norm.weight"], eps)) for n, t in (("q", q), ("k", k)))
    q, k = keep(_rope(q, frequencies)), keep(_rope(k, frequencies))
    k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.get("query_pre_attn_scalar", dim))
    seen = np.tril(np.ones((length, length), bool))
    seen &= ~np.tril(seen, -(window or length))
    scores = np.where(seen, _capped(scores, config.get("attn_logit_softcapping")), -np.inf)
    out = keep(np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(length, heads * dim))
    return keep(out @ w[prefix + "o_proj.weight"].T)


def _latent_attention(x: np.ndarray, w: dict[str, np.ndarray], prefix: str, config: Config, keep: Round) -> np.ndarray:
    """DeepSeek-V2's, with keys and values of every head; neighbouring numbers of a head are turned together."""
    heads, nope, turned = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    length, frequencies, rank = len(x), _frequencies(config, local=False), config["kv_lora_rank"]

    def turn(t: np.ndarray) -> np.ndarray:
        return _rope(np.concatenate([t[..., ::2], t[..., 1::2]], axis=-1), frequencies)

    def normed(t: np.ndarray, name: str) -> np.ndarray:
        return keep(_rms(t, w[f"{prefix}{name}_a_layernorm.weight"], 1e-6))

    if prefix + "q_proj.weight" in w:
        q = keep(x @ w[prefix + "q_proj.weight"].T)
    else:
        q = keep(normed(keep(x @ w[prefix + "q_a_proj.weight"].T), "q") @ w[prefix + "q_b_proj.weight"].T)
    q = q.reshape(length, heads, nope + turned)
    latent = keep(x @ w[prefix + "kv_a_proj_with_mqa.weight"].T)
    expanded = keep(normed(latent[:, :rank], "kv") @ w[prefix + "kv_b_proj.weight"].T).reshape(length, heads, -1)
    shared = np.repeat(turn(latent[:, None, rank:]), heads, axis=1)
    q = np.concatenate([q[..., :nope], turn(q[..., nope:])], axis=-1)
    k = np.concatenate([expanded[..., :nope], shared], axis=-1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(nope + turned)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    out = keep(np.einsum("hqk,khd->qhd", _softmax(scores), expanded[..., nope:]).reshape(length, -1))
    return keep(out @ w[prefix + "o_proj.weight"].T)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mlp(x: np.ndarray, w: dict[str, np.ndarray], prefix: str, keep: Round, activation: Round = _silu) -> np.ndarray:
    gate, up = keep(x @ w[prefix + "gate_proj.weight"].T), keep(x @ w[prefix + "up_proj.weight"].T)
    return keep(keep(activation(gate) * up) @ w[prefix + "down_proj.weight"].T)


def _gemma2_layer(x: np.ndarray, w: dict[str, np.ndarray], layer: int, config: Config, keep: Round) -> np.ndarray:
    prefix, eps = f"model.layers.{layer}.", config["rms_norm_eps"]
    window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else None

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return keep(_rms(x, 1 + w[f"{prefix}{name}_layernorm.weight"], eps))

    attended = _attention(norm(x, "input"), w, prefix + "self_attn.", config, keep, window, about=1)
    x = keep(x + norm(attended, "post_attention"))
    fed = _mlp(norm(x, "pre_feedforward"), w, prefix + "mlp.", keep, _gelu)
    return keep(x + norm(fed, "post_feedforward"))


def router(x: np.ndarray, kernel: np.ndarray, n_chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [T, E] of hidden states [T, D] by the router [E, D], and the most probable experts [T, k]."""
    probabilities = _softmax(x @ kernel.T)
    return probabilities, np.argsort(-probabilities, axis=-1, kind="stable")[:, :n_chosen]


def _experts(
    x: np.ndarray, w: dict[str, np.ndarray], prefix: str, config: Config, keep: Round, routed: list[np.ndarray]
) -> np.ndarray:
    """A token's most probable experts, by their probabilities; they are added to `routed`."""
    if (bias := w.get(prefix + "gate.e_score_correction_bias")) is not None:
        scores = 1 / (1 + np.exp(-(x @ w[prefix + "gate.weight"].T)))
        chosen = np.array([_in_groups(one, config) for one in scores + bias])
        routed.append(chosen)
        made = mixed(x, scores, chosen, lambda i, one: _mlp(one, w, f"{prefix}experts.{i}.", keep), config)
        return keep(_mlp(x, w, prefix + "shared_experts.", keep) + made * config["routed_scaling_factor"])
    probabilities, most_probable = router(x, w[prefix + "gate.weight"], config["num_experts_per_tok"])
    routed.append(most_probable)
    shared = np.zeros_like(x)
    if (kernel := w.get(prefix + "shared_expert_gate.weight")) is not None:
        shared = _mlp(x, w, prefix + "shared_expert.", keep) / (1 + np.exp(-(x @ kernel.T)))
    return keep(
        shared
        + mixed(x, probabilities, most_probable, lambda i, one: _mlp(one, w, f"{prefix}experts.{i}.", keep), config)
    )


def _in_groups(scores: np.ndarray, config: Config) -> np.ndarray:
    """The best experts of one token, among those of the groups whose two best scores have the largest sums."""
    groups = scores.reshape(config["n_group"], -1)
    best = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1), kind="stable")[: config["topk_group"]]
    allowed = np.isin(np.arange(len(scores)) // groups.shape[1], best)
    return np.argsort(np.where(allowed, -scores, np.inf), kind="stable")[: config["num_experts_per_tok"]]


def mixed(
    x: np.ndarray,
    probabilities: np.ndarray,
    experts: np.ndarray,
    of_expert: Callable[[int, np.ndarray], np.ndarray],
    config: Config,
) -> np.ndarray:
    """[T, D]: what the experts [T, k] make of each token, by their probabilities [T, E]."""
    out = np.zeros_like(x)
    for token, (of, chosen) in enumerate(zip(probabilities, experts, strict=True)):
        total = of[chosen].sum() if config["norm_topk_prob"] else 1.0
        for i in chosen:
            out[token] += of_expert(i, x[token]) * of[i] / total
    return out


def logits(
    weights: Weights,
    config: Config,
    ids: Sequence[int],
    keep: Round = _exact,
    routed: list[np.ndarray] | None = None,
) -> np.ndarray:
    """float64[T, vocabulary]: the scores of the next token after every prefix of `ids`. To `routed` the experts [T, k]
    of each layer are added.

    Weights and what one operation hands to the next are rounded by `keep`: with `bfloat16`, as in a model of that
    dtype.
    """
    w = {name: keep(np.asarray(value, np.float64)) for name, value in weights.items()}
    eps, routed = config["rms_norm_eps"], [] if routed is None else routed
    gemma = "model.layers.0.pre_feedforward_layernorm.weight" in w
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    if gemma:
        x = keep(x * keep(np.sqrt(np.float64(x.shape[-1]))))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if gemma:
            x = _gemma2_layer(x, w, layer, config, keep)
            continue
        if "kv_lora_rank" in config:
            normed = keep(_rms(x, w[prefix + "input_layernorm.weight"], eps))
            x = keep(x + _latent_attention(normed, w, prefix + "self_attn.", config, keep))
        else:
            x = keep(
                x
                + _attention(
                    keep(_rms(x, w[prefix + "input_layernorm.weight"], eps)),
                    w,
                    prefix + "self_attn.",
                    config,
                    keep,
                    config.get("sliding_window"),
                )
            )
        normed = keep(_rms(x, w[prefix + "post_attention_layernorm.weight"], eps))
        if prefix + "mlp.gate.weight" in w:
            x = keep(x + _experts(normed, w, prefix + "mlp.", config, keep, routed))
        else:
            x = keep(x + _mlp(normed, w, prefix + "mlp.", keep))
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    gain = w["model.norm.weight"] + (1 if gemma else 0)
    return _capped(keep(_rms(x, gain, eps)) @ head.T, config.get("final_logit_softcapping"))


def log_softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """float64, same shape: log softmax(scores / temperature) over the last axis."""
    z = scores / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def score(
    weights: Weights,
    config: Config,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float = 1.0,
    keep: Round = _exact,
) -> np.ndarray:
    """float64[len(output)]: log-probability of every output token given all before it."""
    table = log_softmax(logits(weights, config, [*prompt, *output], keep), temperature)
    return np.array([table[len(prompt) - 1 + i, token] for i, token in enumerate(output)])


def greedy(weights: Weights, config: Config, prompt: Sequence[int], n: int) -> list[int]:
    """The n most likely continuations, one after another."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(logits(weights, config, ids)[-1].argmax()))
    return ids[len(prompt) :]
