"""What training takes: counted by hand, and against what XLA allots."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from services.trainer.backend.tunix import TunixBackend
from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.models.options import ModelOptions
from services.trainer.options import LoraOptions
from services.trainer.planning import memory
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.process.host_memory import host_limit, resident
from tests.support import families, models
from tests.trainer.support import model_of
from tests.trainer.test_policy import CONFIG_1, OPTIONS, WEIGHTS, ppo_options, sao_options

SHAPE = ModelConfig.parse(CONFIG_1)
MODEL = ModelOptions(Path(), "float32", "none", (1, 1), ("fsdp", "tp"), 0)
POLICY = replace(OPTIONS, layout=BatchLayout((16,), 8, 0))
N = sum(value.size for value in WEIGHTS.values())
LORA = LoraOptions(4, 8.0, memory._PROJECTIONS)


def test_what_is_live_is_counted_in_the_order_of_the_operations() -> None:
    def f(x: jax.Array) -> jax.Array:
        a = jnp.sin(x)  # 400 bytes, until it is used last
        b = jnp.concatenate([a, a])  # 800 beside it
        c = b.sum()
        return (a * c).sum()  # 400 beside a

    found = memory.live_bytes(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((100,), jnp.float32)).jaxpr)
    assert found == 400 + 800 + 4  # c is made while both live
    chain = jax.make_jaxpr(lambda x: (jnp.sin(jnp.cos(x)) * 2).sum())(jnp.zeros(100)).jaxpr
    assert memory.live_bytes(chain) == 0  # one loop
    inner = memory.live_bytes(jax.make_jaxpr(lambda x: jax.jit(f)(x) + jnp.cumsum(x))(jnp.zeros(100)).jaxpr)
    assert inner >= found


def test_parameters_optimizer_and_gradients_are_those_of_the_shapes() -> None:
    found = memory.estimate(SHAPE, MODEL, POLICY)
    assert found.kept == {"parameters": 4 * N, "optimizer": 8 * N, "reference": 4 * N, "critic": 0}
    assert found.step["gradients"] == 4 * N
    assert found.published == 0
    two = memory.estimate(SHAPE, MODEL, replace(POLICY, layout=BatchLayout((16,), 4, 0)))
    assert two.step["gradients"] == 8 * N  # those of a micro-batch are added to those before
    assert 0.4 < two.step["activations"] / found.step["activations"] < 0.7
    assert (found.branches, two.branches) == (4 * N, 0)
    assert found.peak_with_branches >= found.peak == found.peak_with_branches - 4 * N
    assert two.peak_with_branches == two.peak
    copies = found.host_copies if found.on_host else 0  # a checkpoint is written beside steps
    assert found.peak == sum(found.kept.values()) + sum(found.step.values()) + copies
    rounded = memory.estimate(SHAPE, replace(MODEL, dtype="bfloat16"), replace(POLICY, published_dtype="bfloat16"))
    assert rounded.published == 2 * N
    assert rounded.step["activations"] < found.step["activations"]


def test_adapters_take_a_fraction_and_share_the_reference() -> None:
    found = memory.estimate(SHAPE, replace(MODEL, lora=LORA), POLICY)
    n = sum(v.size for v in models.random_adapter(CONFIG_1, 0, rank=4).values())
    assert found.kept == {"parameters": 4 * (N + n), "optimizer": 8 * n, "reference": 0, "critic": 0}
    half = memory.estimate(SHAPE, replace(MODEL, lora=LORA, dtype="bfloat16"), POLICY)
    assert half.kept["parameters"] == 2 * N + 4 * n
    begun = memory.estimate(SHAPE, replace(MODEL, lora=LORA), POLICY, BatchLayout((16,), 8, 0))
    assert begun.phases["warm start"] > begun.phases["step"]  # all parameters are trained there


def test_frozen_attention_of_a_critic_has_no_moments() -> None:
    attention = sum(value.size for name, value in WEIGHTS.items() if ".self_attn." in name)
    for options, moved in ((ppo_options(), N), (sao_options(), N - attention)):
        found = memory.estimate(SHAPE, MODEL, replace(options, layout=POLICY.layout))
        assert found.kept["critic"] == 4 * N + 8 * moved


def test_a_mesh_divides_what_it_shards() -> None:
    whole = memory.estimate(SHAPE, MODEL, POLICY)
    parts = memory.estimate(SHAPE, replace(MODEL, mesh_shape=(2, 2)), POLICY)
    assert 0.25 <= parts.kept["parameters"] / whole.kept["parameters"] < 0.4
    assert 0.4 < parts.step["activations"] / whole.step["activations"] < 0.6


def test_many_layers_are_reckoned_from_a_few() -> None:
    deep, traced = (replace(SHAPE, num_hidden_layers=n) for n in (6, 3))
    found = memory._traced(deep, MODEL, POLICY)
    assert memory._activations(deep, MODEL, POLICY) == pytest.approx(found, rel=0.02)
    assert found > memory._traced(traced, MODEL, POLICY)


@pytest.mark.parametrize("tokens", [None, 2048])
def test_the_kernels_of_splash_attention_keep_no_scores(tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = replace(POLICY, layout=BatchLayout((1024,), 2, 0, tokens=tokens))
    found = []
    for by_splash in (True, False):
        monkeypatch.setattr(memory, "uses_splash", lambda *_, taken=by_splash: taken)  # as on a TPU, which is not here
        found.append(memory.estimate(SHAPE, MODEL, policy).step["activations"])
    assert found[0] < found[1] / 2


EXPERTS = ModelConfig.parse(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }
)


def test_what_the_engine_has_chosen_is_counted() -> None:
    policy = replace(POLICY, layout=BatchLayout((16, 32), 8, 0))
    replayed, alone = (memory.estimate(EXPERTS, replace(MODEL, routing_replay=on), policy) for on in (True, False))
    assert EXPERTS.routing is not None
    n_experts = 8 * 32 * EXPERTS.routing.n_layers * EXPERTS.routing.per_token
    assert replayed.step["micro-batch"] - alone.step["micro-batch"] == 2 * n_experts  # int16: -1 as well
    assert replayed.step["activations"] >= alone.step["activations"]
    assert memory.micro_batch(EXPERTS, MODEL, policy, 3).routed.shape == (3, 32, 3, 4)
    of_many = replace(EXPERTS, experts=replace(EXPERTS.experts, num_experts=300))  # pyright: ignore[reportArgumentType]
    assert memory.micro_batch(of_many, MODEL, policy, 3).routed.dtype == jnp.int32


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *itertools.product(["llama-tied", "qwen2", "qwen3"], ["none", "block", "decoder"]),
        ("gemma2", "block"),
        ("gemma2", "decoder"),
        ("qwen3-moe", "block"),
        ("experts", "none"),
        ("experts", "decoder"),
    ],
)
def test_the_estimate_is_near_what_xla_allots(name: str, remat: str) -> None:
    """Also: each policy of rematerialization saves something in each family."""
    known = {"qwen3": SHAPE, "experts": EXPERTS}
    described = known[name] if name in known else ModelConfig.parse(families.case(name).written)
    described = replace(described, num_hidden_layers=3)
    policy = replace(POLICY, layout=BatchLayout((128,), 8, 0))
    model = replace(MODEL, remat=remat)
    found = memory.estimate(described, model, policy).step["activations"]
    expected = allotted(described, model, policy)
    assert 0.7 < found / expected < 1.4
    if remat != "none":
        assert expected < 0.8 * allotted(described, replace(model, remat="none"), policy)


def allotted(described: ModelConfig, model: ModelOptions, policy: PolicyOptions) -> int:
    """By XLA, optimized as in use, beside arguments and results."""
    of_batch, shapes = memory.of_micro_batch(described, model, policy)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return jax.jit(of_batch).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def test_what_cannot_fit_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: (2**20, "this machine"))
    backend = TunixBackend(replace(MODEL, folder=tmp_path / "not there"), SHAPE, POLICY, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"takes .* MiB and this machine has .* parameters .* most \(step\)") as error:
        backend.build()
    hint = error.value.hint or ""
    saved = [float(part.split("saves ")[1].split(" MiB")[0]) for part in hint.split("), ")]
    assert saved == sorted(saved, reverse=True)
    for knob in ("trainer.train_micro_batch_size=1", "model.remat=decoder", "trainer.lora.rank=16", "algorithm.beta=0"):
        assert knob in hint


def test_what_fits_is_told() -> None:
    found = memory.estimate(SHAPE, MODEL, POLICY)
    memory.check(found, found.peak, "this machine", list)
    assert found.to_mib().keys() <= {*found.kept, *found.step, "host copies of a checkpoint", "most (step)"}


def test_the_limit_is_that_of_the_container_or_of_the_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree: 1 kB\n", encoding="utf-8")
    assert host_limit(tmp_path, meminfo) == (1024_000, "this machine")
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert host_limit(tmp_path, meminfo) == (1024_000, "this machine")
    (tmp_path / "memory.max").write_text("4096\n", encoding="utf-8")
    assert host_limit(tmp_path, meminfo) == (4096, "this container")
    assert resident() > 2**20


def test_the_policy_holds_what_was_reckoned() -> None:
    one = Policy(model_of(WEIGHTS, CONFIG_1), POLICY, CONFIG_1, None)
    contents = one.contents()
    found = memory.estimate(SHAPE, MODEL, POLICY)
    assert sum(v.nbytes for v in contents.params.values()) == found.kept["parameters"]
    moments = sum(v.nbytes for name, v in contents.optimizer.items() if v.ndim)
    assert moments == found.kept["optimizer"]
