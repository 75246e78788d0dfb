"""Names and shapes of weights: two layouts on disk, one in the engine."""

from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.sglang_jax.loading import layout
from shared.errors import WeightsError
from tests.support import families, imaginary_family, models

CONFIG = models.tiny_config(num_hidden_layers=1)
HF = models.random_weights(CONFIG, 0)
TUNIX = models.to_tunix(HF, CONFIG)


def to_engine(weights: models.Weights, shapes: layout.Shapes, head_dim: int) -> models.Weights:
    return dict(layout.to_engine({k: lambda v=v: v for k, v in weights.items()}, shapes, head_dim))


def engine_shapes() -> dict[str, tuple[int, ...]]:
    """From the table in the module's docstring."""
    dim, ffn, vocab, q, kv = 64, 128, 512, 4 * 128, 2 * 128
    layer = {
        "input_layernorm.scale": (dim,),
        "post_attention_layernorm.scale": (dim,),
        "self_attn.q_norm.scale": (128,),
        "self_attn.k_norm.scale": (128,),
        "self_attn.q_proj.weight": (dim, q),
        "self_attn.k_proj.weight": (dim, kv),
        "self_attn.v_proj.weight": (dim, kv),
        "self_attn.o_proj.weight": (q, dim),
        "mlp.gate_proj.weight": (dim, ffn),
        "mlp.up_proj.weight": (dim, ffn),
        "mlp.down_proj.weight": (ffn, dim),
    }
    top = {"model.embed_tokens.embedding": (vocab, dim), "model.norm.scale": (dim,), "lm_head.embedding": (vocab, dim)}
    return top | {f"model.layers.0.{name}": shape for name, shape in layer.items()}


def test_both_layouts_give_the_same_weights() -> None:
    from_hf, from_tunix = (to_engine(w, engine_shapes(), 128) for w in (HF, TUNIX))
    assert from_hf.keys() == engine_shapes().keys()
    for name, value in from_hf.items():
        np.testing.assert_array_equal(value, from_tunix[name], err_msg=name)
    np.testing.assert_array_equal(
        from_hf["model.layers.0.self_attn.q_proj.weight"], HF["model.layers.0.self_attn.q_proj.weight"].T
    )


def test_heads_repeat_where_the_engine_has_more_devices_than_heads() -> None:
    shapes = engine_shapes() | {"model.layers.0.self_attn.k_proj.weight": (64, 4 * 128)}
    wide = to_engine(TUNIX, shapes, 128)["model.layers.0.self_attn.k_proj.weight"].reshape(64, 4, 128)
    narrow = TUNIX["layers.0.attn.k_proj.w"]
    for head in range(4):
        np.testing.assert_array_equal(wide[:, head], narrow[:, head // 2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers.0.mlp.gate_proj.kernel": None}, "mlp.gate_proj"),
        ({"layers.1.mlp.gate_proj.kernel": np.zeros((64, 128), np.float32)}, "layers.1"),
        ({"final_norm.w": np.zeros(65, np.float32)}, "model.norm.scale has shape"),
        ({"layers.0.mlp.experts.kernel": np.zeros(3, np.float32)}, "weight layers.0.mlp.experts.kernel is unknown"),
        ({"model.norm.weight": np.zeros(64, np.float32)}, r"weight model\.norm\.weight is unknown"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, np.ndarray | None], named: str) -> None:
    weights = {k: v for k, v in (TUNIX | change).items() if v is not None}
    with pytest.raises(WeightsError, match=named):
        to_engine(weights, engine_shapes(), 128)


def test_a_tied_model_ignores_the_copy_that_hugging_face_may_keep() -> None:
    shapes = {k: v for k, v in engine_shapes().items() if k != "lm_head.embedding"}
    assert to_engine(HF, shapes, 128).keys() == shapes.keys()
    with pytest.raises(WeightsError, match="lm_head"):
        to_engine(TUNIX, shapes, 128)


def test_experts_are_one_array_in_the_engine() -> None:
    case = families.case("qwen3-moe")
    n, inner, dim = 6, 32, 48
    shapes = {f"model.layers.{i}.mlp.{name}": (n, dim, inner) for i in range(2) for name in ("wi_0", "wi_1")}
    shapes |= {f"model.layers.{i}.mlp.wo": (n, inner, dim) for i in range(2)}
    shapes |= {f"model.layers.{i}.moe_gate.kernel": (dim, n) for i in range(2)}
    shapes |= {f"model.layers.{i}.self_attn.c_proj.weight": (128, dim) for i in range(2)}
    kept = {k: v for k, v in case.weights.items() if ".mlp." in k or "o_proj" in k}
    theirs = {k: v for k, v in models.to_tunix(case.weights, case.config).items() if ".mlp." in k or "o_proj" in k}
    from_hf, from_tunix = (to_engine(w, shapes, 32) for w in (kept, theirs))
    for name, value in from_hf.items():
        np.testing.assert_array_equal(value, from_tunix[name], err_msg=name)
    for i in range(n):
        prefix = f"model.layers.1.mlp.experts.{i}"
        np.testing.assert_array_equal(from_hf["model.layers.1.mlp.wi_1"][i], kept[f"{prefix}.up_proj.weight"].T)
        np.testing.assert_array_equal(from_hf["model.layers.1.mlp.wo"][i], kept[f"{prefix}.down_proj.weight"].T)
    del kept["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(WeightsError, match="others are missing"):
        to_engine(kept, shapes, 32)


def test_biases_go_where_their_projections_go() -> None:
    config = models.tiny_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"], num_hidden_layers=1)
    weights = models.random_weights(config, 0)
    shapes = {
        name: shape for name, shape in engine_shapes().items() if not name.endswith(("q_norm.scale", "k_norm.scale"))
    }
    shapes |= {f"model.layers.0.self_attn.{name}_proj.bias": (n * 128,) for name, n in (("q", 4), ("k", 4), ("v", 2))}
    shapes["model.layers.0.self_attn.k_proj.weight"] = (64, 4 * 128)  # the engine has more devices than key heads
    from_hf, from_tunix = (to_engine(w, shapes, 128) for w in (weights, models.to_tunix(weights, config)))
    for name, value in from_hf.items():
        np.testing.assert_array_equal(value, from_tunix[name], err_msg=name)
    narrow = weights["model.layers.0.self_attn.k_proj.bias"].reshape(2, 128)
    wide = from_hf["model.layers.0.self_attn.k_proj.bias"].reshape(4, 128)
    for head in range(4):
        np.testing.assert_array_equal(wide[head], narrow[head // 2])


def test_a_new_familys_spelling_is_taken_from_its_record(tmp_path: Path) -> None:
    shapes = {"model.norm.gain": (64,)}
    with imaginary_family.added(tmp_path):
        found = to_engine({"model.norm.weight": HF["model.norm.weight"]}, shapes, 128)
    np.testing.assert_array_equal(found["model.norm.gain"], HF["model.norm.weight"])
