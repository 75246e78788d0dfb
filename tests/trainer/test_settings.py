from pathlib import Path

import pytest

from services.trainer import options, settings
from services.trainer.settings import TokenLimits
from shared import config
from shared.errors import ConfigError

ROOT = Path(__file__).parents[2]
TOKENS = TokenLimits(vocab_size=512, pad_id=0)


def load(*overrides: str, name: str = "quickstart"):
    return config.load([ROOT / f"configs/{name}.yaml"], overrides).config


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "configs").glob("*.yaml")])
def test_every_committed_config_makes_options(name: str):
    run = load("services.redis_url=redis://x", name=name)
    settings.from_config(run)
    policy = options.policy_options(run, TOKENS)
    assert policy.layout.buckets[-1] >= run.rollout.engine.context_length
    assert policy.rows_per_step == run.trainer.groups_per_step * run.grpo_config.num_generations
    options.sft_options(run, TOKENS)
    assert settings.plan(run, TOKENS).rules.max_staleness == run.grpo_config.off_policy_steps


def test_a_service_alone_needs_the_address_of_redis():
    with pytest.raises(ConfigError, match=r"services\.redis_url is not set"):
        settings.from_config(load())


def test_micro_batches_must_divide_over_the_mesh():
    with pytest.raises(ConfigError, match="micro-batches of 6 sequences do not divide over fsdp=4"):
        options.policy_options(load("trainer.train_micro_batch_size=6", "trainer.mesh.shape=[4,1]"), TOKENS)


def test_the_upper_clip_follows_the_lower_one_unless_given():
    assert options.policy_options(load("grpo_config.epsilon=0.1"), TOKENS).loss.epsilon_high == 0.1
    assert options.policy_options(load("grpo_config.epsilon_high=0.3"), TOKENS).loss.epsilon_high == 0.3


def test_importance_sampling_is_off_unless_asked_for():
    assert options.policy_options(load(), TOKENS).loss.sampler_is_threshold is None
    assert options.policy_options(load("grpo_config.sampler_is=token"), TOKENS).loss.sampler_is_threshold == 2.0


def test_an_interval_that_would_wait_for_itself_is_refused():
    with pytest.raises(ConfigError, match="off_policy_steps >= 3"):
        load("trainer.checkpointing_options.save_interval_steps=4")
