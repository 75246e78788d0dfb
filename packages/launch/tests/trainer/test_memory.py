"""What training takes: counted by hand, and against what XLA allots."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from services.trainer.backend.policy import PolicyBackend, copied
from services.trainer.batches.batch import BatchLayout
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.learner.optimizer import make_optimizer
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.learner.scoring import divided, objective, params_of
from services.trainer.learner.shapes import micro_batch
from services.trainer.learner.train_step import Learner, gradient
from services.trainer.models.arrays import CheckpointContents
from services.trainer.models.family import Model, abstract, make_mesh
from services.trainer.models.options import ModelOptions, Remat
from services.trainer.models.sharding import place, replicated
from services.trainer.options import LoraOptions
from shared import config
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.serving import Platform
from shared.process.host_memory import host_limit, release_freed, resident
from shared.run.checkpoint_files import Probe
from shared.schema import Projection
from tests.support import families, models
from tests.support.memory import forget_peak, most_resident
from tests.trainer.support import model_of
from tests.trainer.test_policy import CONFIG_1, OPTIONS, WEIGHTS
from volley_launch.training import checking as memory
from volley_launch.training import trainer
from volley_launch.training.activations import BatchSize, activations
from volley_launch.training.checking import TrainingMemory
from volley_launch.training.memory import MemoryEstimate

SHAPE = ModelConfig.parse(CONFIG_1)
MODEL = ModelOptions(Path(), "float32", "none", (1, 1), ("fsdp", "tp"), 0)
POLICY = replace(OPTIONS, layout=BatchLayout((16,), 8, 0))
N = sum(value.size for value in WEIGHTS.values())
LORA = LoraOptions(4, 8.0, get_args(Projection))
RUN = (
    "model.path=m",
    "data.env=frozen_lake",
    "trainer.groups_per_step=4",
    "grpo_config.num_generations=2",
    "trainer.length_buckets=[16]",
    "rollout.engine.context_length=16",
    "algorithm.beta=0.1",
)


def estimate(*overrides: str, of: ModelConfig = SHAPE, platform: Platform = "cpu") -> MemoryEstimate:
    return trainer.estimate(config.load([], [*RUN, *overrides]).config, of, platform)


def test_parameters_optimizer_and_gradients_are_those_of_the_shapes() -> None:
    found = estimate()
    assert found.kept == {"parameters": 4 * N, "optimizer": 8 * N, "reference": 4 * N, "critic": 0}
    assert found.step["gradients"] == 4 * N
    assert found.published == 0
    two = estimate("trainer.train_micro_batch_size=4")
    assert two.step["gradients"] == 8 * N  # those of a micro-batch are added to those before
    assert 0.4 < two.step["activations"] / found.step["activations"] < 0.7
    assert (found.branches, two.branches) == (4 * N, 0)
    assert found.peak_with_branches >= found.peak == found.peak_with_branches - 4 * N
    assert two.peak_with_branches == two.peak
    # A checkpoint is written beside steps.
    assert found.peak == sum(found.kept.values()) + sum(found.step.values()) + found.host_copies
    rounded = estimate("model.dtype=bfloat16", platform="tpu")
    assert rounded.published == 2 * N
    assert found.to_mib().keys() <= {*found.kept, *found.step, "host copies of a checkpoint", "most (step)"}


def test_adapters_take_a_fraction_and_share_the_reference() -> None:
    found = estimate("trainer.lora.rank=4")
    n = sum(v.size for v in models.random_adapter(CONFIG_1, 0, rank=4).values())
    assert found.kept == {"parameters": 4 * (N + n), "optimizer": 8 * n, "reference": 0, "critic": 0}
    assert estimate("trainer.lora.rank=4", "model.dtype=bfloat16").kept["parameters"] == 2 * N + 4 * n
    begun = estimate("trainer.lora.rank=4", "sft.max_steps=3", "sft.batch_size=8")
    assert begun.phases["warm start"] > begun.phases["step"]  # all parameters are trained there


def test_frozen_attention_of_a_critic_has_no_moments() -> None:
    attention = sum(value.size for name, value in WEIGHTS.items() if ".self_attn." in name)
    for name, moved in (("ppo", N), ("sao", N - attention)):
        assert estimate(f"algorithm.name={name}").kept["critic"] == 4 * N + 8 * moved


def test_a_mesh_divides_what_it_shards() -> None:
    whole, parts = estimate(), estimate("trainer.mesh.shape=[2,2]")
    assert 0.25 <= parts.kept["parameters"] / whole.kept["parameters"] < 0.4
    assert 0.2 < parts.step["activations"] / whole.step["activations"] < 0.6


def test_the_kernels_of_splash_attention_keep_no_scores() -> None:
    long = ("trainer.length_buckets=[1024]", "rollout.engine.context_length=1024", "trainer.train_micro_batch_size=2")
    by_splash, by_blocks = (estimate(*long, f"trainer.attention={how}", platform="tpu") for how in ("auto", "blocks"))
    assert by_splash.step["activations"] < by_blocks.step["activations"] / 2


def test_copies_of_a_checkpoint_lie_beside_a_step_only_if_one_follows() -> None:
    last, often = (estimate(f"trainer.checkpointing_options.save_interval_steps={n}") for n in (10, 5))
    assert often.phases["step"] - last.phases["step"] == last.host_copies > 0
    assert last.phases["checkpoint"] == often.phases["checkpoint"] >= sum(last.kept.values()) + last.host_copies


def test_weights_before_a_step_are_kept_for_spot_checks() -> None:
    checked = estimate("trainer.spot_checks=0.1")
    assert checked.phases["step"] - estimate().phases["step"] == checked.host_former == 4 * N


def test_the_reference_lies_on_the_host_if_asked() -> None:
    """Which a CPU's devices are as well: nothing is saved there."""
    on_device, aside = (estimate(f"trainer.offload_reference={off}") for off in ("false", "true"))
    assert (aside.kept["reference"], aside.host_reference) == (0, 4 * N)
    assert aside.peak == on_device.peak
    assert aside.to_mib()["reference on the host"] == on_device.to_mib()["reference"]
    elsewhere = [estimate(f"trainer.offload_reference={off}", platform="gpu") for off in ("false", "true")]
    assert elsewhere[0].peak - elsewhere[1].peak == 4 * N


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
    longer = ("trainer.length_buckets=[16,32]",)
    replayed, alone = (estimate(*longer, f"model.routing_replay={on}", of=EXPERTS) for on in ("true", "false"))
    assert EXPERTS.routing is not None
    n_experts = 8 * 32 * EXPERTS.routing.n_layers * EXPERTS.routing.per_token
    assert replayed.step["micro-batch"] - alone.step["micro-batch"] == 2 * n_experts  # int16: -1 as well
    policy = replace(POLICY, layout=BatchLayout((16, 32), 8, 0))
    assert micro_batch(EXPERTS, MODEL, policy, 3).routed.shape == (3, 32, 3, 4)
    of_many = replace(EXPERTS, experts=replace(EXPERTS.experts, num_experts=300))  # pyright: ignore[reportArgumentType]
    assert micro_batch(of_many, MODEL, policy, 3).routed.dtype == jnp.int32


def _family(name: str) -> ModelConfig:
    return replace(ModelConfig.parse(families.case(name).written), num_hidden_layers=3)


SMOLLM2 = ModelConfig.parse(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("described", "rows", "length", "dtype", "remat", "lora"),
    [
        (SHAPE, 8, 128, "float32", "none", None),
        (SHAPE, 32, 40, "float32", "block", None),
        (SHAPE, 8, 128, "bfloat16", "decoder", None),
        *((_family(name), 8, 128, "float32", "block", None) for name in ("llama-tied", "qwen2", "gemma2")),
        (_family("qwen3-moe"), 8, 128, "float32", "block", None),
        (EXPERTS, 8, 128, "float32", "none", None),
        (EXPERTS, 8, 128, "float32", "decoder", None),
        (SMOLLM2, 8, 256, "float32", "none", None),
        (SMOLLM2, 8, 256, "float32", "block", None),
        (SMOLLM2, 8, 256, "float32", "decoder", None),
        (SMOLLM2, 8, 256, "float32", "decoder", LORA),
        (SMOLLM2, 2, 1024, "bfloat16", "decoder", None),
    ],
)
def test_activations_are_near_what_xla_allots(
    described: ModelConfig, rows: int, length: int, dtype: str, remat: Remat, lora: LoraOptions | None
) -> None:
    """Also: rematerialization saves something."""
    model = replace(MODEL, dtype=dtype, remat=remat, lora=lora)
    policy = replace(POLICY, layout=BatchLayout((length,), rows, 0))
    expected = allotted(described, model, policy)
    batch = BatchSize(rows, length, dtype, remat, adapts=lora is not None, on_host=True)
    is_tiny = described.hidden_size < 100
    assert 0.6 < activations(described, batch) / expected < (2.0 if is_tiny else 1.6)
    if remat != "none" and described.num_hidden_layers > 1:
        assert expected < 0.8 * allotted(described, replace(model, remat="none"), policy)


def allotted(described: ModelConfig, model: ModelOptions, policy: PolicyOptions) -> int:
    """By XLA, optimized as in use, beside arguments and results."""
    mesh = make_mesh((1, 1), ("fsdp", "tp"))
    made: Model = nnx.merge(*abstract(described, model.dtype, model.remat, mesh, model.lora))
    entropy = "gradient" if policy.algorithm.needs.entropy else "value"
    of_batch = gradient(objective(made, policy.algorithm.loss, policy.temperature, entropy))
    shapes = (*divided(params_of(made)), micro_batch(described, model, policy, policy.layout.rows))
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        with mesh:
            compiled = jax.jit(of_batch).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def test_a_checkpoint_is_in_memory_once_while_it_is_written(tmp_path: Path) -> None:
    arrays = {f"layers.{i}": jnp.full((2048, 1024), i, jnp.float32) for i in range(24)}
    contents = copied(CheckpointContents(arrays, {}, None, {}, Probe((), (), ())))
    assert all(contents.params[name] is not value for name, value in arrays.items())
    release_freed()
    forget_peak()
    before = resident()
    OrbaxArrays().write(tmp_path / "params", contents.params)
    assert most_resident() - before < sum(value.nbytes for value in arrays.values()) / 2


def test_a_step_lets_go_of_a_gradient_once_it_is_added() -> None:
    """Beside the sum and the newest gradient there are temporary arrays, because tests run unoptimized programs."""
    weights = place(np.zeros((4096, 4096), np.float32), replicated(make_mesh((1, 1), ("fsdp", "tp"))))
    optimizer = make_optimizer(OPTIONS.optimizer)
    learner = Learner(
        {"w": weights}, optimizer, lambda params, batch: (jnp.sum(params["w"]) * jnp.mean(batch.mask), {})
    )
    shapes = micro_batch(SHAPE, MODEL, POLICY, 8)
    batches = [jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)] * 6
    for _ in range(2):
        release_freed()
        forget_peak()
        before = resident()
        learner.update(batches, apply=False)
    assert most_resident() - before < 4.5 * weights.nbytes


_SCORES_EXACTLY = """
import numpy as np
from services.trainer.learner.scoring import Scorer, params_of
from tests.support import models
from tests.trainer.support import model_of

config = models.tiny_config(vocab_size=96, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
model = model_of(models.random_weights(config, 0), config, dtype="bfloat16")
params, ids = params_of(model), np.zeros((1, 32), np.int32)
made = Scorer(model, 1.0)._score_exactly.lower(params, ids, ids, None, None).compile()
print(made.memory_analysis().temp_size_in_bytes, sum(4 * value.size for value in params.values()))
"""


def test_an_exact_pass_rounds_one_matrix_at_a_time() -> None:
    """In a process of its own, because XLA reads its flags once."""
    made = subprocess.run([sys.executable, "-c", _SCORES_EXACTLY], check=True, capture_output=True, encoding="utf-8")
    temporary, whole = map(int, made.stdout.split())
    assert temporary < whole / 4


def test_what_cannot_fit_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, deep = config.load([], RUN).config, replace(SHAPE, num_hidden_layers=4)
    limit = max(estimate(one, of=deep).peak for one in ("trainer.train_micro_batch_size=4", "model.remat=decoder"))
    monkeypatch.setattr(memory, "available", lambda device: (limit, "this machine"))
    planned, folder = TrainingMemory(run, deep), tmp_path / "not there"
    backend = PolicyBackend(replace(MODEL, folder=folder), deep, POLICY, None, planned=planned)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"takes .* MiB and this machine has .* parameters .* most \(step\)") as error:
        backend.build()
    found = (error.value.hint or "").split(" or ")
    assert len(found) == 2
    assert all(estimate(*one.split(" with "), of=deep).peak <= limit for one in found)
    monkeypatch.setattr(memory, "available", lambda device: (2**10, "this machine"))
    with pytest.raises(ConfigError, match="this machine") as error:
        planned.checked(warm_start=False)
    assert error.value.hint == "a smaller model, or a mesh of more devices"


def test_the_limit_is_that_of_the_container_or_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\n", encoding="utf-8")
    assert host_limit(tmp_path, tmp_path) == (1024_000, "this machine")
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert host_limit(tmp_path, tmp_path) == (1024_000, "this machine")
    (tmp_path / "memory.max").write_text("4096\n", encoding="utf-8")
    assert host_limit(tmp_path, tmp_path) == (4096, "this container")
    assert resident() > 2**20


def test_the_policy_holds_what_was_reckoned() -> None:
    one = Policy(model_of(WEIGHTS, CONFIG_1), POLICY, CONFIG_1, None)
    contents = one.contents()
    found = estimate()
    assert sum(v.nbytes for v in contents.params.values()) == found.kept["parameters"]
    moments = sum(v.nbytes for name, v in contents.optimizer.items() if v.ndim)
    assert moments == found.kept["optimizer"]
