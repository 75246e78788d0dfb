"""What a configuration says that cannot come about is named, each in one sentence; what can is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shared import config
from shared.errors import ConfigError
from shared.findings import beyond_positions, findings
from shared.models.config import ModelConfig
from shared.run_config import run_model
from tests.support.committed import every_config

ALONE = {"grpo_config__num_generations": 1}
DISTILLED, TEACHER = "on_policy_distillation", {"services__orchestrator__teacher__url": "http://t"}
OWN_TEACHER = {"url": "self", "templates": ["{sibling}"]}
VLLM = {"rollout__engine__kind": "vllm", "rollout__engine__url": "http://v"}
LORA = {"trainer__lora": {"rank": 2, "target_modules": ["q_proj"]}, "trainer__optimizer_config__learning_rate": 2e-4}
LORA_IN_BFLOAT16 = LORA | {"model__dtype": "bfloat16"}
CONFIGS = Path(__file__).parents[3] / "configs"


def of(**given: Any) -> list[str]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"env": "e"}}
    for dotted, value in given.items():
        *parents, leaf = dotted.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return findings(run_model().model_validate(tree))


def test_defaults_mean_what_they_say():
    assert of() == []


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({"algorithm__sampler_is": "token"}, "algorithm.epsilon=0.2 has no effect"),
        ({"algorithm__name": "gspo-token", "algorithm__epsilon": 0.2}, "algorithm.epsilon=0.2 clips almost nothing"),
        ({"algorithm__sampler_is_threshold": 3.0}, "algorithm.sampler_is_threshold=3 has no effect"),
        ({"algorithm__sampler_rs_bounds": [0.9, 1.1]}, "algorithm.sampler_rs_bounds=(0.9, 1.1) has no effect"),
        ({"algorithm__beta": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_loss_mode": "kl"}, "algorithm.kl_loss"),
        ({"algorithm__name": "dapo", "algorithm__overlong_length": 9}, "algorithm.overlong_length=9 has no effect"),
        ({"algorithm__kl_loss_mode": "kl", "algorithm__beta": 0.1}, "algorithm.beta=0.1 has no effect"),
        ({"algorithm__epsilon": 5.0}, "algorithm.epsilon=5 sets no lower bound"),
        (
            {"algorithm__reward_normalization__grouping": "batch"},
            "algorithm.reward_normalization.grouping=batch has no",
        ),
        ({"algorithm__name": "ppo", "algorithm__critic_warmup_steps": 10}, "algorithm.critic_warmup_steps=10 never"),
        ({"algorithm__kl_loss_mode": "kl"}, "algorithm.kl_loss_mode=kl has no effect"),
        (
            {"algorithm__epsilon": None, "algorithm__sampler_is": "token", "grpo_config__off_policy_steps": 3},
            "algorithm.epsilon=null with grpo_config.off_policy_steps=3: importance weights",
        ),
        ({"algorithm__name": "sao", "algorithm__gae_lambda": 0.5, **ALONE}, "algorithm.gae_lambda=0.5 has no effect"),
        ({"algorithm__name": "sao"}, "grpo_config.num_generations=8 makes episodes wait"),
        (
            {"algorithm__name": "sao", **LORA, **ALONE},
            "algorithm.critic_frozen=attention leaves the critic nothing",
        ),
        ({"trainer__filters__zero_variance": True, "algorithm__name": "echo"}, "trainer.filters.zero_variance=true"),
        (
            {"services__orchestrator__teachers": {"e": {"url": "http://t"}}},
            "services.orchestrator.teachers.e.url=http://t has no effect",
        ),
        ({"trainer__lora": {"rank": 2}}, "trainer.optimizer_config.learning_rate=1e-05 hardly moves adapters"),
        (VLLM | LORA_IN_BFLOAT16, "rollout.engine.kind=vllm serves adapters merged into bfloat16 weights"),
        ({"rollout__sampling__top_p": 0.9}, "rollout.sampling.top_p=0.9: the engine samples from"),
        ({"rollout__sampling__top_k": 50}, "rollout.sampling.top_k=50: the engine samples from"),
        ({"trainer__filters__zero_variance": True, "algorithm__name": "ppo"}, "trainer.filters.zero_variance=true"),
        ({"trainer__filters__zero_variance": True, "algorithm__credit": "turn"}, "trainer.filters.zero_variance=true"),
        ({"trainer__filters__zero_variance": True, "algorithm__name": DISTILLED, **TEACHER}, "trainer.filters.zero_v"),
        ({"trainer__filters__zero_variance": True, "algorithm__teacher_kl_coef": 0.1, **TEACHER}, "trainer.filters"),
        ({"rollout__sampling__temperature": 0.7, "algorithm__name": DISTILLED, **TEACHER}, "rollout.sampling.temp"),
        (TEACHER, "services.orchestrator.teacher.url=http://t has no effect: algorithm.teacher_kl_coef is 0"),
        (
            {"services__orchestrator__teacher": OWN_TEACHER, "algorithm__name": DISTILLED, **ALONE},
            "services.orchestrator.teacher.templates has no effect: with grpo_config.num_generations=1",
        ),
        ({"trainer__filters__logprob": 11.0}, "trainer.filters.logprob=11 drops nothing"),
        ({"orchestrator__eval_every_n_steps": 11}, "orchestrator.eval_every_n_steps=11 has no effect"),
        ({"trainer__optimizer_config__warmup_steps": 10}, "trainer.optimizer_config.learning_rate=1e-05 is never"),
        ({"sft__max_steps": 5, "sft__optimizer_config__warmup_steps": 5}, "sft.optimizer_config.learning_rate=1e-05"),
    ],
)
def test_each_is_named_once_by_its_key(given: dict[str, Any], begins: str):
    (found,) = of(**given)
    assert found.startswith(begins)
    assert found.endswith(".")
    assert "\n" not in found


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm__sampler_is": "token", "grpo_config__num_iterations": 2},
        {"algorithm__name": "gspo-token"},
        LORA_IN_BFLOAT16,
        VLLM | LORA_IN_BFLOAT16 | {"model__dtype": "float32"},
        VLLM | LORA_IN_BFLOAT16 | {"algorithm__sampler_is": "token", "grpo_config__num_iterations": 2},
        {"algorithm__name": DISTILLED, **TEACHER},
        {"algorithm__teacher_kl_coef": 0.1, **TEACHER},
        {"algorithm__name": "cispo", "algorithm__sampler_is": "token"},
        {"algorithm__epsilon": None, "algorithm__sampler_is": "token"},
        {"algorithm__kl_loss_mode": "mse_kl", "algorithm__beta": 0.1},
        {
            "algorithm__sampler_is_threshold": 3.0,
            "algorithm__sampler_is": "token",
            "grpo_config__num_iterations": 2,
        },
        {"rollout__sampling__top_p": 1.0, "rollout__sampling__top_k": -1},
        {"trainer__filters__logprob": 0.5, "trainer__filters__zero_variance": True},
        {"orchestrator__eval_every_n_steps": 10},
        {"trainer__optimizer_config__warmup_steps": 9},
    ],
)
def test_what_can_act_is_not_named(given: dict[str, Any]):
    assert of(**given) == []


def test_both_cuts_of_sampling_are_one_finding():
    (found,) = of(rollout__sampling__top_p=0.9, rollout__sampling__top_k=50)
    assert found.startswith("rollout.sampling.top_p=0.9 and top_k=50:")


@every_config
def test_committed_configurations(path: Path):
    given = ["data.train=t", "data.eval=e"] if "gsm8k" in path.stem else []
    named = [finding.partition("=")[0] for finding in findings(config.load([path], given).config)]
    assert named == (["algorithm.epsilon"] if path.stem == "gsm8k_qwen3_4b_tpu" else [])


def test_a_filter_that_takes_every_group_is_refused():
    one = run_model().model_validate({"model": {"path": "m"}, "data": {"env": "e"}})
    lonely = one.model_copy(
        update={
            "grpo_config": one.grpo_config.model_copy(update={"num_generations": 1}),
            "trainer": one.trainer.model_copy(
                update={"filters": one.trainer.filters.model_copy(update={"zero_variance": True})}
            ),
        }
    )
    with pytest.raises(ConfigError, match="drops every group"):
        findings(lonely)


@pytest.mark.parametrize(
    ("length", "turns", "what"),
    [(2**22, 8, r"16 episodes of 4,194,304 tokens may have"), (8192, 4096, "turns may have")],
)
def test_groups_that_nobody_would_take_in_are_refused_before_anything_starts(length: int, turns: int, what: str):
    large = {
        "grpo_config__num_generations": 64 if turns > 8 else 16,
        "rollout__engine__context_length": length,
        "trainer__length_buckets": [length],
        "orchestrator__max_turns": turns,
    }
    with pytest.raises(ConfigError, match=what):
        of(**large)
    assert of(**large, mode="sft", sft__train=["f.jsonl"], data__env="e") == []


def test_settings_of_the_engine_that_a_server_of_another_project_ignores():
    server = {"rollout__engine__kind": "vllm", "rollout__engine__url": "http://s"}
    assert of(**server) == []
    (finding,) = of(**server, rollout__engine__tp_size=2)
    assert finding.startswith("rollout.engine.tp_size=2 has no effect")
    (finding,) = of(**server, rollout__sampling__temperature=0.7)
    assert finding.startswith("rollout.sampling.temperature=0.7 needs a vLLM server")
    assert of(**{**server, "rollout__engine__kind": "sglang"}, rollout__sampling__temperature=0.7) == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rollout": {"engine": {"context_length": 2048}}}, None),
        ({"rollout": {"engine": {"context_length": 2049}}}, "rollout.engine.context_length=2049 is beyond .*=2048"),
        ({"mode": "sft", "sft": {"train": ["x"]}, "trainer": {"length_buckets": [16, 4096]}}, "length_buckets=4096"),
    ],
)
def test_a_context_beyond_the_models_positions_is_noted(given: dict[str, Any], named: str | None):
    run = run_model().model_validate({"model": {"path": "m"}, "data": {"env": "e"}, **given})
    found = beyond_positions(run, ModelConfig.read(CONFIGS / "models" / "tiny"))
    assert found is None if named is None else re.search(named, found or "")
