"""Record of a model family: its names, defaults and parts. Code that depends on the family asks this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of `layer_types` in a config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. Defaults are those of the configuration classes of transformers 4.51 to 5.24.

    Attributes:
        title: name in sentences.
        architecture: class in transformers. The engine has a class of the same name: sglang-jax's, or ours beside it.
        defaults: sizes where the key is absent. `num_key_value_heads` None equals num_attention_heads; `head_dim` None
            is hidden_size / num_attention_heads.
        neutral: keys whose value must be one of these, because nothing else is computed; added to the keys that
            `config` checks for every family. Without values, any is accepted.
        written: keys that our config.json has beside the sizes.
        names: parameters of a layer that only this family has: Tunix's name to Hugging Face's (see `names`).
        untrained: parameters of a layer, by Tunix's name, that get no gradient by design, so training keeps them.
        engine_names: parts of parameter names that sglang-jax spells in its own way for this family.
        qkv_bias: projections to queries, keys and values have a bias.
        qk_norm: queries and keys are normalized by head.
        llama3_rope: `rope_type` "llama3" is computed.
        rope_theta: default of `rope_theta`.
        tied: default of `tie_word_embeddings`.
        scaled_embeddings: embeddings are multiplied by √hidden_size.
        norms_add_one: norms multiply by 1 + weight instead of weight.
        output_norms: outputs of attention and of the feed-forward part are normalized before the residual sum.
        activation: of the feed-forward part.
        experts: keys of `config.Experts` that are computed, with defaults; None: layers are dense. With `n_group`,
            experts are chosen as DeepSeek-V3 does.
        latent: keys of `config.Latent`, with defaults; None: queries, keys and values are projected at once.
        attention: keys of `config.AttentionConfig` that are computed, with defaults; None: plain attention and logits.
        layer_types: pattern that repeats over the layers where config.json has no `layer_types`. Its kinds, and
            `full_attention`, are computed. With one kind, config.json has no such key.
        tokenizer: class of transformers 5 for a tokenizer whose files name no class.
        forces_tokenizer: that class reads every tokenizer, whatever class the files name.
    """

    title: str
    architecture: str
    defaults: Mapping[str, int | None]
    neutral: Mapping[str, tuple[Any, ...]]
    written: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    untrained: tuple[str, ...] = ()
    engine_names: Mapping[str, str] = field(default_factory=dict[str, str])
    qkv_bias: bool = False
    qk_norm: bool = False
    llama3_rope: bool = False
    rope_theta: float = 10_000.0
    tied: bool = False
    scaled_embeddings: bool = False
    norms_add_one: bool = False
    output_norms: bool = False
    activation: str = "silu"
    experts: Mapping[str, float] | None = None
    latent: Mapping[str, int] | None = None
    attention: Mapping[str, float | None] | None = None
    layer_types: tuple[str, ...] = (FULL,)
    tokenizer: str = "PreTrainedTokenizerFast"
    forces_tokenizer: bool = False

    @property
    def has_further_parts(self) -> bool:
        """True if the trainer needs a package to compute it (part `model_parts`)."""
        of_gemma = self.scaled_embeddings or self.norms_add_one or self.output_norms or self.activation != "silu"
        return of_gemma or self.experts is not None or self.latent is not None

    @property
    def is_mixed(self) -> bool:
        """True if layers are of several kinds, so that config.json has `layer_types`."""
        return len(set(self.layer_types)) > 1

    def __post_init__(self) -> None:
        """Raises ValueError for parts that are not computed together."""
        if self.experts is not None and (self.output_norms or self.activation != "silu"):
            raise ValueError(f"{self.title}: experts are computed with SiLU and without output_norms")
