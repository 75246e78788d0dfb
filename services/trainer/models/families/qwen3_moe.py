"""Qwen3-MoE, on Tunix's model of Qwen3. What its experts compute is in `experts`.

google-tunix 0.1.7 lets the weights of the chosen experts always add up to 1, whatever `norm_topk_prob` says.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from tunix.models.qwen3 import model as tunix_qwen3

from services.trainer.models.families.qwen3 import Qwen3
from services.trainer.models.family import Remat, tunix_sizes
from shared.models.config import ModelConfig


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen3:
    """With parameters of no meaning; `dtype` is that of activations."""
    experts = model.experts
    assert experts is not None
    sizes = {
        "hidden_dim": experts.moe_intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
    }
    config = tunix_qwen3.ModelConfig(
        **(tunix_sizes(model, dtype) | sizes), remat_config=tunix_qwen3.RematConfig[remat.upper()]
    )
    made = tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    for layer in made.layers:
        layer.mlp.norm_topk_prob = experts.norm_topk_prob
        _shard(layer.mlp)
    return made


def _shard(mlp: Any) -> None:
    """Says how the parameters are divided, as those of other families say it: experts over fsdp, what is within one
    over tp, and every device has the router.
    """
    of = mlp.shd_config
    for name, axes in (
        ("gate_proj", of.exp_weight_edf),
        ("up_proj", of.exp_weight_edf),
        ("down_proj", of.exp_weight_efd),
    ):
        setattr(mlp, name, nnx.Param(getattr(mlp, name).get_value(), out_sharding=axes))
    mlp.router.kernel = nnx.Param(mlp.router.kernel.get_value(), out_sharding=(None, None))
