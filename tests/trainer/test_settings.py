import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from services.trainer import options, settings
from services.trainer.algorithms.registry import names
from services.trainer.algorithms.terms.importance import Correction
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient
from services.trainer.algorithms.terms.surrogate import Clip
from services.trainer.settings import TokenLimits
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared import config
from shared.algorithm_schema import sections
from shared.errors import ConfigError
from shared.routing import RoutingShape
from shared.run.group_size import token_bytes
from shared.teacher_view import TeacherPrompt, TeacherView
from tests.support.committed import every_config
from tests.trainer.support import group
from volley_supervised.options import supervised_options

ROOT = Path(__file__).parents[2]
TOKENS = TokenLimits(vocab_size=512, pad_id=0)
_TEACHER = "services.orchestrator.teacher.url=http://127.0.0.1:1"
NEEDED = {
    "on_policy_distillation": (_TEACHER,),
    "mopd": (_TEACHER,),
    "gdpo": ("algorithm.reward_components.goal=1",),
    "own": (f"algorithm.loss={ROOT}/examples/rules/luspo.py:loss",),
}
"""Settings that an algorithm cannot do without."""


def load(*overrides: str, name: str = "quickstart"):
    return config.load([ROOT / f"configs/{name}.yaml"], overrides).config


def algorithm_of(*overrides: str) -> PolicyGradient[Any]:
    made = options.policy_options(load(*overrides), TOKENS).algorithm
    assert isinstance(made, PolicyGradient)
    return made


@every_config
def test_every_committed_config_makes_options(path: Path):
    run = config.load([path], ["services.redis_url=redis://x"]).config
    settings.from_config(run)
    policy = options.policy_options(run, TOKENS)
    assert policy.layout.buckets[-1] >= run.rollout.engine.context_length
    assert policy.rows_per_step == run.trainer.groups_per_step * run.grpo_config.num_generations
    supervised_options(run, TOKENS)
    assert settings.plan(run, TOKENS).rules.max_staleness == run.grpo_config.off_policy_steps


TAUGHT = ("services.orchestrator.teacher.url=http://t", "services.redis_url=redis://x")


@pytest.mark.parametrize("name", ["on_policy_distillation", "ppo", "grpo"])
def test_a_teacher_is_needed_where_it_counts(name: str):
    own = {"on_policy_distillation": ()}.get(name, ("algorithm.teacher_kl_coef=0.5",))
    for more, is_taught in ((own, True), ((), name == "on_policy_distillation")):
        run = load(f"algorithm.name={name}", *TAUGHT, *more)
        assert options.policy_options(run, TOKENS).algorithm.needs.teacher == is_taught
        assert settings.plan(run, TOKENS).rules.has_teacher == is_taught


SIZES = ("services.redis_url=redis://x", "grpo_config.num_generations=16", "rollout.engine.context_length=65536")
LONG = (*SIZES, "trainer.length_buckets=[65536]")
EXPERTS = replace(TOKENS, routing=RoutingShape(48, 128, 8))


def test_a_run_whose_groups_could_be_too_large_is_refused():
    with pytest.raises(
        ConfigError, match=r"may have 394 MiB, more than the 256 MiB .* 393 bytes per token, 384 of them"
    ) as refused:
        settings.plan(load(*LONG), EXPERTS)
    knobs = (refused.value.hint or "").split(" or ")
    assert [knob.split("=")[0].split(".")[-1] for knob in knobs] == [
        "routing_replay",
        "context_length",
        "num_generations",
    ]
    for knob in knobs:
        settings.plan(load(*LONG, knob), EXPERTS)
    settings.plan(load(*LONG), TOKENS)
    with pytest.raises(ConfigError, match="297 bytes per token, 288 of them") as refused:
        settings.plan(load(*LONG, "grpo_config.num_generations=20"), replace(TOKENS, routing=RoutingShape(36, 256, 8)))
    assert "num_generations=13" in (refused.value.hint or "")
    wide = replace(TOKENS, routing=RoutingShape(36, 257, 8))  # two bytes an expert
    with pytest.raises(ConfigError, match="585 bytes per token"):
        settings.plan(load(*LONG), wide)


def test_a_run_whose_groups_could_have_too_many_turns_is_refused():
    many = (*SIZES[:1], "rollout.engine.context_length=4096", "grpo_config.num_generations=256")
    many = (*many, "orchestrator.max_turns=500", "trainer.length_buckets=[4096]")
    with pytest.raises(ConfigError, match=r"256 episodes of 500 turns may have 2,592,768 values") as refused:
        settings.plan(load(*many), TOKENS)
    knobs = (refused.value.hint or "").split(" or ")
    assert [knob.split("=")[0].split(".")[-1] for knob in knobs] == ["max_turns", "num_generations"]
    for knob in knobs:
        settings.plan(load(*many, knob), TOKENS)


def test_no_group_is_larger_than_is_reckoned():
    made = group(1, "e000001-s000000", n=3, length=500, vocab=512)
    routed = np.zeros((500, 4, 2), np.uint8)
    view = TeacherView((TeacherPrompt(np.arange(500, dtype=np.int32), 4, "e000001-s000000"),))
    trajectories = tuple(
        replace(one, routed_experts=routed, teacher_logprobs=one.logprobs, teacher_view=view)
        for one in made.trajectories
    )
    n_bytes = len(replace(made, trajectories=trajectories).encode())
    own = load("algorithm.teacher_kl_coef=1", "services.orchestrator.teacher={url: self, templates: ['{sibling}']}")
    arrays = 3 * 500 * token_bytes(own, RoutingShape(4, 6, 2))
    assert arrays == 3 * 500 * (9 + 4 + 4 + RoutingShape(4, 6, 2).token_bytes)
    assert arrays < n_bytes < arrays + 3 * 2**16


def test_a_service_alone_needs_the_address_of_redis():
    with pytest.raises(ConfigError, match=r"services\.redis_url is not set"):
        settings.from_config(load())


def test_micro_batches_must_divide_over_the_mesh():
    with pytest.raises(ConfigError, match="micro-batches of 6 sequences do not divide over fsdp=4"):
        options.policy_options(load("trainer.train_micro_batch_size=6", "trainer.mesh.shape=[4,1]"), TOKENS)


def test_packed_micro_batches_hold_the_longest_sequence_on_every_shard():
    packed = options.policy_options(load("trainer.micro_batch_tokens=160", "trainer.mesh.shape=[4,1]"), TOKENS).layout
    assert (packed.tokens, packed.shards) == (160, 4)
    with pytest.raises(ConfigError, match="micro_batch_tokens=159 is less than 4 rows of 40 tokens"):
        options.policy_options(load("trainer.micro_batch_tokens=159", "trainer.mesh.shape=[4,1]"), TOKENS)
    with pytest.raises(ConfigError, match="give one of them"):
        load("trainer.micro_batch_tokens=160", "trainer.train_micro_batch_size=8")


def test_rows_of_supervised_training_need_not_hold_an_engines_context():
    """It has none; the longest row is then what must fit."""
    run = ["mode=sft", "sft.train=[x.jsonl]", "rollout.engine.context_length=512", "trainer.length_buckets=[40]"]
    made = options.layout(load(*run, "trainer.micro_batch_tokens=80"), TOKENS, 8)
    assert (made.buckets, made.rows) == ((40,), 2)
    with pytest.raises(ConfigError, match="micro_batch_tokens=39 is less than 1 rows of 40 tokens"):
        options.layout(load(*run, "trainer.micro_batch_tokens=39"), TOKENS, 8)


async def test_an_iterator_that_ends_too_early_in_the_trainings_thread_is_an_error():
    """A future cannot carry it: the trainer would load for ever."""
    with ThreadPoolExecutor(1) as thread:
        waiter = Waiter(thread, TrainerStatus("r", 0))
        with pytest.raises(RuntimeError, match="ended too early"):
            await asyncio.wait_for(waiter.blocking(next, iter(())), 60)
        assert await waiter.blocking(next, iter((3,))) == 3


def test_splash_attention_is_asked_for_only_where_all_rows_can_have_it():
    with pytest.raises(ConfigError, match="length_buckets has 40, which is not a multiple of 128"):
        load("trainer.attention=splash")
    run = load("trainer.attention=splash", "trainer.length_buckets=[128,384]")
    options.policy_options(run, TOKENS)
    assert options.model_options(run, ROOT).attention == "splash"
    assert options.model_options(load(), ROOT).attention == "auto"


def test_the_upper_clip_follows_the_lower_one_unless_given():
    assert Clip.of(algorithm_of("algorithm.epsilon=0.1").section).high == 0.1
    assert Clip.of(algorithm_of("algorithm.epsilon_high=0.3").section).high == 0.3


def test_importance_sampling_is_off_unless_asked_for():
    assert not algorithm_of().actor.correction.needs_old
    assert algorithm_of("algorithm.sampler_is=token").actor.correction == Correction("token", 2.0)


@pytest.mark.parametrize("name", names())
def test_every_algorithm_is_made_of_its_name(name: str):
    settings = [f"algorithm.name={name}", *NEEDED.get(name, ())]
    made = options.policy_options(load("algorithm.beta=0.1", *settings), TOKENS)
    assert made.algorithm.needs.reference
    assert made.algorithm.needs.values == (made.critic is not None) == (name in ("ppo", "sao"))


def test_every_section_has_an_algorithm():
    assert {get_args(one.model_fields["name"].annotation)[0] for one in sections()} == set(names())
