"""Settings that Tunix's learner is refused with, because it computes them wrong."""

import pytest

from shared import config
from shared.errors import ConfigError

CONFIG = "model: {path: m}\ndata: {env: frozen_lake}\ntrainer: {backend: tunix}\n"
PPO = "algorithm.name=ppo"


def load(tmp_path, *overrides):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return config.load([path], overrides).config


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.sampling.temperature=0.8", "grpo_config.num_iterations=2"),
        ("algorithm.name=gspo-token", "trainer.train_micro_batch_size=8"),
        (PPO,),
        (PPO, "algorithm.beta=0.1", "algorithm.kl_loss_mode=kl"),
    ],
)
def test_what_tunix_computes_right_is_accepted(tmp_path, overrides):
    assert load(tmp_path, *overrides).trainer.backend == "tunix"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("trainer.lora={}",), "trainer.lora"),
        (("trainer.micro_batch_tokens=4096",), "trainer.micro_batch_tokens"),
        (("trainer.train_micro_batch_size=8",), "token-mean"),
        (("algorithm.name=drgrpo",), "sequence-mean-token-scale"),
        (("algorithm.name=cispo",), "algorithm.name"),
        (("algorithm.epsilon=null", "algorithm.sampler_is=token"), "algorithm.epsilon"),
        (("algorithm.sampler_rs=token",), "algorithm.sampler_rs"),
        (("algorithm.entropy_coef=0.1",), "algorithm.entropy_coef"),
        (("algorithm.name=reinforce_plus_plus", "grpo_config.num_generations=1"), "num_generations"),
        (("orchestrator.generation.truncation=left",), "truncation"),
        ((PPO, "rollout.sampling.temperature=0.8"), "temperature"),
        ((PPO, "algorithm.sampler_is=token"), "algorithm.sampler_is"),
        ((PPO, "algorithm.loss_agg_mode=seq-mean-token-sum"), "loss_agg_mode"),
        ((PPO, "algorithm.critic_warmup_steps=2"), "critic_warmup_steps"),
        ((PPO, "algorithm.beta=0.1"), "kl_loss_mode"),
    ],
)
def test_what_tunix_computes_wrong_is_refused_by_name(tmp_path, overrides, named):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *overrides)
    assert "trainer.backend=tunix" in error.value.detail
    assert named in error.value.detail
    assert load(tmp_path, "trainer.backend=volley", *overrides)
