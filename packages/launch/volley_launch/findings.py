"""Settings of the core that have no effect, or another than their name says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shared.algorithm_base import ClippedSection
from shared.engine_schema import EngineSection
from shared.schema import RunConfig
from shared.server_schema import placeholders

_MOST_SEQUENCE_EPSILON = 0.01
"""GSPO's ratio is a geometric mean over a sequence; the paper clips at 3e-4 and 4e-4 (arXiv:2507.18071, 5.1)."""
_OWN_ENGINE = (
    "tp_size",
    "max_total_tokens",
    "max_prefill_tokens",
    "precompile_token_paddings",
    "precompile_bs_paddings",
)
"""Settings of the engine that Volley starts itself."""
_STALE_STEPS = 3
"""Staleness from which unclipped importance sampling is unstable."""
_LOW_RATE = 2e-5
"""Learning rate that suits full training, and hardly moves adapters, which start at zero."""
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MOST_LOGPROB = 10.0
"""Nats per token by which even random weights with a vocabulary of 22,000 differ less."""


def findings_of_core(config: RunConfig) -> Iterator[str]:
    """Yield a sentence, without its full stop, for each such setting of an RL run (see `shared.findings`)."""
    for examine in _EXAMINERS:
        yield from examine(config)


def _clipping(config: RunConfig) -> Iterator[str]:
    loss, n_updates = config.algorithm, config.grpo_config.num_iterations
    if not isinstance(loss, ClippedSection) or loss.epsilon is None:
        return
    if loss.correction.is_used and n_updates == 1 and loss.name != "cispo":
        how = f"sampler_is={loss.sampler_is}" if loss.sampler_is != "none" else f"sampler_rs={loss.sampler_rs}"
        yield (
            f"algorithm.epsilon={loss.epsilon:g} has no effect: with {how} the ratio is to the policy at the step's"
            " start, and with grpo_config.num_iterations=1 that is the policy itself"
        )
    if loss.name != "cispo" and loss.epsilon >= 1:
        yield f"algorithm.epsilon={loss.epsilon:g} sets no lower bound on ratios: they are never below 0"
    if loss.name == "gspo-token" and loss.epsilon > _MOST_SEQUENCE_EPSILON:
        yield (
            f"algorithm.epsilon={loss.epsilon:g} clips almost nothing: with name=gspo-token the ratio is a"
            " geometric mean over a whole sequence; the paper uses 0.0003 (epsilon_high 0.0004)"
        )


def _stale(config: RunConfig) -> Iterator[str]:
    loss, staleness = config.algorithm, config.grpo_config.off_policy_steps
    if loss.is_unbounded and staleness >= _STALE_STEPS:
        yield (
            f"algorithm.epsilon=null with grpo_config.off_policy_steps={staleness}: importance weights of data that is"
            f" {_STALE_STEPS} steps old or more have a large variance, and nothing clips them; set epsilon, or use"
            " an algorithm that masks tokens far from the sampler: dppo, kpop or sao"
        )


def _critic_keys(config: RunConfig) -> Iterator[str]:
    critic, lora = config.algorithm.critic, config.trainer.lora
    if critic is None:
        return
    plain = type(critic).model_fields["gae_lambda"].default
    if critic.gae_lambda_alpha is not None and critic.gae_lambda != plain:
        yield f"algorithm.gae_lambda={critic.gae_lambda:g} has no effect: gae_lambda_alpha is set"
    if critic.name == "sao" and (n := config.grpo_config.num_generations) > 1:
        yield (
            f"grpo_config.num_generations={n} makes episodes wait for the others of their task, and"
            " algorithm.name=sao does not compare them: set it to 1, and trainer.groups_per_step to the episodes of a"
            " step"
        )
    if lora is not None and critic.critic_frozen == "attention" and _ATTENTION.issuperset(lora.target_modules):
        yield (
            "algorithm.critic_frozen=attention leaves the critic nothing but its last layer to train:"
            " trainer.lora.target_modules are all of attention"
        )


def _unused(config: RunConfig) -> Iterator[str]:
    loss = config.algorithm
    for key, needed, why in (
        ("sampler_is_threshold", loss.correction.level != "none", "sampler_is is none"),
        ("sampler_rs_bounds", loss.correction.rejection != "none", "sampler_rs is none"),
        ("kl_loss_mode", loss.beta > 0, "beta is 0"),
        ("kl_in", loss.beta > 0, "beta is 0"),
        ("overlong_penalty", getattr(loss, "overlong_buffer", None) is not None, "overlong_buffer is not given"),
        ("overlong_length", getattr(loss, "overlong_buffer", None) is not None, "overlong_buffer is not given"),
    ):
        if key in loss.model_fields_set and not needed and getattr(loss, key) != type(loss).model_fields[key].default:
            yield f"algorithm.{key}={_shown(getattr(loss, key))} has no effect: {why}"
    how = loss.reward_normalization
    if how.method == "identity" and "grouping" in how.model_fields_set:
        yield f"algorithm.reward_normalization.grouping={how.grouping} has no effect: method is identity"
    if loss.beta and loss.kl_in == "loss" and loss.kl_loss_mode == "kl":
        yield (
            f"algorithm.beta={loss.beta:g} has no effect: as a loss, the gradient of kl_loss_mode=kl (k1) has"
            " expectation 0; use low_var_kl or mse_kl, or kl_in=reward"
        )
    if loss.beta and loss.kl_in == "reward" and "kl_loss_mode" in loss.model_fields_set:
        yield f"algorithm.kl_loss_mode={loss.kl_loss_mode} has no effect: a penalty in the reward always uses k1"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sampling(config: RunConfig) -> Iterator[str]:
    sampling = config.rollout.sampling
    cut = [
        text
        for is_cut, text in (
            (sampling.top_p < 1, f"top_p={sampling.top_p:g}"),
            (sampling.top_k > 0, f"top_k={sampling.top_k}"),
        )
        if is_cut
    ]
    if cut:
        yield (
            f"rollout.sampling.{' and '.join(cut)}: the engine samples from a part of the vocabulary, but its"
            " log-probabilities are normalized over the whole vocabulary, so ratios and importance weights compare the"
            " trainer with another policy than the one that sampled"
        )


def _filters(config: RunConfig) -> Iterator[str]:
    filters = config.trainer.filters
    loss = config.algorithm
    learns = loss.learns_from_equal_rewards
    if filters.zero_variance and (learns or loss.credits_turns):
        why = f"algorithm.name={loss.name}" if learns else f"algorithm.{loss.shown_credit}"
        yield (
            f"trainer.filters.zero_variance=true drops groups with a training signal: with {why}, equal rewards of"
            " whole episodes still give advantages other than 0"
        )
    elif filters.zero_variance and loss.teacher_kl_coef:
        yield (
            "trainer.filters.zero_variance=true drops groups with a training signal: with"
            f" algorithm.teacher_kl_coef={loss.teacher_kl_coef:g} the teacher still tells their tokens apart"
        )
    if filters.logprob is not None and filters.logprob > _MOST_LOGPROB:
        yield (
            f"trainer.filters.logprob={filters.logprob:g} drops nothing: not even random weights differ by that many"
            " nats per token"
        )


def _teacher(config: RunConfig) -> Iterator[str]:
    loss, sampling, n = config.algorithm, config.rollout.sampling, config.grpo_config.num_generations
    for key, server in config.services.orchestrator.all_teachers().items():
        if not loss.teacher_kl_coef:
            yield f"{key}.url={server.url} has no effect: algorithm.teacher_kl_coef is 0"
        elif server.templates and all("sibling" in placeholders(one) for one in server.templates) and n == 1:
            yield f"{key}.templates has no effect: with grpo_config.num_generations=1 there is no {{sibling}}"
    if loss.teacher_kl_coef and sampling.temperature != 1:
        yield (
            f"rollout.sampling.temperature={sampling.temperature:g} with algorithm.teacher_kl_coef"
            f"={loss.teacher_kl_coef:g}: the teacher returns log-probabilities at temperature 1, so the policy at"
            f" {sampling.temperature:g} is trained towards the teacher at 1"
        )


def _periods(config: RunConfig) -> Iterator[str]:
    steps, every = config.trainer.max_steps, config.orchestrator.eval_every_n_steps
    if every is not None and every > steps > 1:
        yield (
            f"orchestrator.eval_every_n_steps={every} has no effect: the run has {steps} steps, and the"
            " first and last weights are always evaluated"
        )
    critic = config.algorithm.critic
    if critic is not None and critic.critic_warmup_steps >= steps:
        yield (
            f"algorithm.critic_warmup_steps={critic.critic_warmup_steps} never trains the policy: the run has {steps}"
            " steps"
        )
    n_of_run = steps * config.grpo_config.num_iterations
    yield from config.trainer.optimizer_config.findings("trainer.optimizer_config", n_of_run)
    if critic is not None:
        yield from critic.critic_optimizer_config.findings("algorithm.critic_optimizer_config", n_of_run)


def _adapters(config: RunConfig) -> Iterator[str]:
    rate = config.trainer.optimizer_config.learning_rate
    if config.trainer.lora is not None and rate < _LOW_RATE:
        yield (
            f"trainer.optimizer_config.learning_rate={rate:g} hardly moves adapters: trainer.lora needs about ten times"
            " the rate of full training, such as 2e-4"
        )


def _engine(config: RunConfig) -> Iterator[str]:
    engine = config.rollout.engine
    if not engine.is_external:
        return
    plain = EngineSection()
    for key in _OWN_ENGINE:
        if (value := getattr(engine, key)) != getattr(plain, key):
            yield f"rollout.engine.{key}={_shown(value)} has no effect: the server of kind {engine.kind} has its own"
    if config.trainer.lora is not None and config.model.dtype != "float32" and not config.algorithm.correction.is_used:
        yield (
            f"rollout.engine.kind={engine.kind} serves adapters merged into {config.model.dtype} weights, which rounds"
            " away most of a small change, so it samples from another policy than the one that is trained; use"
            " rollout.engine.kind=sglang_jax or model.dtype=float32, or correct for it with algorithm.sampler_is"
        )


_EXAMINERS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _clipping,
    _stale,
    _critic_keys,
    _unused,
    _sampling,
    _filters,
    _teacher,
    _periods,
    _adapters,
    _engine,
)
