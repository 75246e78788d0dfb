"""Translate GRL's configuration files: every key is mapped, named as without effect, or refused with the nearest key.

Sections become sections of Volley, and the agents that the file names become environments. The section `volley`, which
GRL does not have, holds keys of Volley; they are merged over the translation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from volley_grl.agents import read_agent
from volley_grl.errors import ConversionError
from volley_grl.keys import COPIED, FIXED, NEUTRAL, OLDER_KEYS, OLDER_SECTIONS, VERL_SECTIONS

_SAMPLING, _EVAL = "cluster.rollout_config.train", "cluster.rollout_config.eval"
_TRAINING = "cluster.training_config"
_ACCUMULATION = "trainer.optim.gradient_accumulation_steps"
_N_BATCHES, _EVAL_PERIOD = 200, 10
"""Steps of a run, and steps between two validations, that GRL takes for -1."""

ReadFile = Callable[[str], Mapping[str, Any]]
"""Reads another file of the same folder by its name without .yaml."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A tree of Volley's keys, and a sentence for each reason why keys of GRL have no effect."""

    tree: dict[str, Any]
    notes: tuple[str, ...]


def translate(tree: Mapping[str, Any], read_file: ReadFile) -> Translation:
    """Translate a file with the files that its `defaults` name. Raises ConversionError naming the key."""
    if found := [section for section in VERL_SECTIONS if section in tree]:
        raise ConversionError(
            f"{found[0]} is a section of GRL's configuration for verl",
            "give the configuration for Tunix, tunix_base.yaml",
        )
    whole = _composed(tree, read_file)
    own = whole.pop("volley", {})
    agents = {name: whole.pop(name) for name in [*whole] if _is_agent(whole[name])}
    keys = TakenKeys(_flat(whole))
    _algorithm(keys)
    for name, targets in COPIED.items():
        if (value := keys.take(name)) is not None:
            keys.set(value, *targets)
    if keys.tree["algorithm"]["name"] == "grpo":
        keys.tree["algorithm"].pop("critic_optimizer_config", None)
    _mesh(keys)
    _sampling(keys)
    n_trained = _groups(keys)
    _steps(keys, n_trained)
    _environments(keys, agents)
    _fixed(keys)
    for name, reason in NEUTRAL.items():
        if keys.take(name) is not None:
            keys.note(name, reason)
    if unknown := [name for name, value in keys.left.items() if value is not None]:
        raise ConversionError(
            f"unknown key {min(unknown)} in GRL's configuration",
            "docs/grl.md lists GRL's keys; Volley's own keys go into the section volley",
        )
    return Translation(_merged(keys.tree, own), keys.notes())


@dataclass
class TakenKeys:
    """Keys that are still to be translated, by dotted name, and the tree of Volley's keys so far.

    `trained` are the agents to train on, and the groups of each in a round.
    """

    left: dict[str, Any]
    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    trained: dict[str, int] = field(default_factory=dict[str, int])
    _reasons: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value and remove its key; null counts as not given."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: int) -> int:
        """Take an integer. Raises ConversionError."""
        value = self.take(name, default)
        if type(value) is not int:
            raise refused(name, value, "it is not an integer", "give a number")
        return value

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """Take a list of integers above 0; a number is a list of one. Raises ConversionError."""
        given = self.take(name, default)
        values: list[Any] = given if isinstance(given, list) else [given]
        if not values or any(type(value) is not int or value < 1 for value in values):
            raise refused(name, given, "it is not a list of numbers above 0", "give one number for each agent")
        return values

    def names(self, name: str, default: list[str]) -> list[str]:
        """Take a list of texts. Raises ConversionError."""
        given = self.take(name, default)
        values: list[Any] = given if isinstance(given, list) else [given]
        if not values or any(not isinstance(value, str) for value in values):
            raise refused(name, given, "it is not a list of names", "give the names of agents in agents.yaml")
        return values

    def set(self, value: Any, *targets: str) -> None:
        """Set keys of Volley."""
        for target in targets:
            *parents, leaf = target.split(".")
            node = self.tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value

    def note(self, name: str, reason: str) -> None:
        """Note a key without effect."""
        self._reasons.setdefault(reason, []).append(name)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each reason."""
        return tuple(f"{', '.join(names)}: {reason}." for reason, names in self._reasons.items())


def refused(key: str, value: Any, reason: str, hint: str) -> ConversionError:
    """Return the error for a value that has no counterpart."""
    return ConversionError(f"{key}={value} of GRL's configuration: {reason}", hint)


def _algorithm(keys: TakenKeys) -> None:
    """PPO with the section trainer.ppo; GRPO with the section grpo of the older layout."""
    is_grpo = any(name.startswith("grpo.") for name in keys.left)
    if is_grpo and any(name.startswith("trainer.ppo.") for name in keys.left):
        raise ConversionError("grpo and trainer.ppo (or ppo) are both given", "keep the section of one algorithm")
    if is_grpo:
        if keys.take("trainer.optim.critic_lr") is not None:
            keys.note("trainer.optim.critic_lr", "GRPO has no critic")
        keys.set({"name": "grpo", "loss_agg_mode": "sequence-mean-token-mean"}, "algorithm")
    else:
        keys.set({"name": "ppo", "kl_in": "reward"}, "algorithm")
    low, plain = keys.take("trainer.ppo.epsilon_low"), keys.take("trainer.ppo.epsilon")
    if low is not None and plain is not None and low != plain:
        keys.note("trainer.ppo.epsilon", "GRL's loss reads epsilon_low and epsilon_high")
    if low is not None or plain is not None:
        keys.set(plain if low is None else low, "algorithm.epsilon")
    keys.set("turn" if keys.take("rollout.use_turn_scores", False) else "episode", "algorithm.credit")
    method = "rollout.reward_normalization.method"
    if keys.left.get(method) == "mean":
        hint = "give mean_std, or identity: whiten_advantages subtracts the mean of the step's advantages"
        raise refused(method, "mean", "rewards are normalized by mean and deviation only", hint)
    keys.set("turn_synchronous", "orchestrator.generation.mode")


def _mesh(keys: TakenKeys) -> None:
    """The one mesh; the plan for Tunix writes it as `dims`, and names it for each role."""
    if (dims := keys.take("cluster.mesh.dims")) is not None:
        if not isinstance(dims, list) or len(dims) != 2 or not all(isinstance(part, list) for part in dims):
            raise refused("mesh.dims", dims, "it is not [shape, names]", 'give [[1, 4], ["fsdp", "tp"]]')
        keys.set(dims[0], "trainer.mesh.shape")
        keys.set(dims[1], "trainer.mesh.axis_names")
    for name in [one for one in keys.left if one.startswith("cluster.role_to_mesh.")]:
        if keys.take(name, "mesh") not in ("mesh", "same"):
            keys.left["cluster.role_to_mesh"] = "a mesh for each role"


def _sampling(keys: TakenKeys) -> None:
    """The context holds the longest prompt and the longest answer after it."""
    answer = keys.number(f"{_SAMPLING}.total_generation_steps", 100)
    length = keys.number(f"{_SAMPLING}.max_prompt_length", 2048) + answer + 1
    keys.set(answer, "grpo_config.max_response_length")
    keys.set(length, "rollout.engine.context_length")
    keys.set([512, 1024, 2048, 4096] if length <= 4096 else [length], "trainer.length_buckets")
    keys.set(keys.take(f"{_SAMPLING}.top_k", -1), "rollout.sampling.top_k")
    for name in ("max_prompt_length", "total_generation_steps", "temperature", "top_p", "top_k"):
        if keys.take(f"{_EVAL}.{name}") is not None:
            keys.note(f"{_EVAL}.{name}", "evaluations sample greedily, with the lengths of training")
    truncation = keys.take("rollout.truncation", "left")
    if truncation != "left":
        hint = "give left, or set volley.orchestrator.generation.truncation to none: the episode then ends"
        raise refused("rollout.truncation", truncation, "conversations lose their oldest turns only", hint)
    keys.set("none" if keys.tree["algorithm"]["credit"] == "turn" else "left", "orchestrator.generation.truncation")


def _groups(keys: TakenKeys) -> int:
    """Groups of a round and of a step. Returns the number of episodes that a step trains."""
    nums, sizes = keys.numbers("rollout.agent_group_num", [4]), keys.numbers("rollout.agent_group_size", [2])
    size = keys.number("grpo.num_generations", sizes[0])
    if {*sizes} != {size}:
        hint = "give all agents one agent_group_size (and grpo.num_generations, if set, the same)"
        raise refused("rollout.agent_group_size", sizes, "all groups of a run have one size", hint)
    keys.set(size, "grpo_config.num_generations")
    ratio, n_round = keys.take("rollout.rollout_filter_ratio", 1.0), sum(nums)
    if type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise refused("rollout.rollout_filter_ratio", ratio, "it is not a share", "give a number above 0, at most 1")
    n_kept = int(ratio * n_round + 1e-9)
    if n_kept < 1:
        hint = "raise agent_group_num or the ratio"
        raise refused("rollout.rollout_filter_ratio", ratio, f"it keeps none of {n_round} groups", hint)
    if n_kept < n_round:
        keys.set(n_kept / n_round, "orchestrator.generation.filters.rollout_filter_ratio")
    else:
        keys.tree["orchestrator"]["generation"].pop("filters", None)
    keys.set(n_kept, "trainer.groups_per_step")
    keys.set(-(-n_round // n_kept) - 1, "grpo_config.off_policy_steps")
    keys.set(max(256, n_round * size), "orchestrator.max_concurrent_episodes")
    training = keys.names("rollout.training", ["simpleSokobanAgent"])
    if len(nums) != len(training):
        raise refused("rollout.training", training, f"agent_group_num has {len(nums)} numbers", "give one for each")
    keys.trained = dict(zip(training, nums, strict=True))
    return n_kept * size


def _steps(keys: TakenKeys, n_trained: int) -> None:
    """Steps, evaluations and checkpoints; GRL counts periods of validation in micro-batches."""
    batch = keys.number(f"{_TRAINING}.mini_batch_size", n_trained)
    if batch != n_trained:
        hint = f"set it to {n_trained}, or change agent_group_num, agent_group_size or rollout_filter_ratio"
        raise refused(f"{_TRAINING}.mini_batch_size", batch, "a step trains on all episodes that are kept", hint)
    steps = keys.number(f"{_TRAINING}.max_steps", -1)
    keys.set(steps if steps > 0 else _N_BATCHES, "trainer.max_steps")
    period, n_micro = keys.number(f"{_TRAINING}.eval_every_n_steps", -1), keys.number(_ACCUMULATION, 1)
    if n_micro > 1:
        keys.note(_ACCUMULATION, "it follows from the step's episodes and train_micro_batch_size")
    keys.set(max(1, period // max(1, n_micro)) if period > 0 else _EVAL_PERIOD, "orchestrator.eval_every_n_steps")
    kept = keys.number(f"{_TRAINING}.checkpoint.max_to_keep", 2)
    if kept < 2:
        keys.note(f"{_TRAINING}.checkpoint.max_to_keep", "the two newest checkpoints are kept at least")
    keys.set(max(2, kept), "trainer.checkpointing_options.max_to_keep")


def _environments(keys: TakenKeys, agents: Mapping[str, Any]) -> None:
    """The first agent is the main environment, others are a mixture; agents only validated have weight 0."""
    validation = keys.names("rollout.validation", ["simpleSokobanAgent"])
    _validated(keys, validation)
    names = dict.fromkeys([*keys.trained, *validation])
    (first, main), *others = rows = [(name, read_agent(name, agents.get(name), keys.note)) for name in names]
    keys.set(main.kind, "data.env")
    keys.set(dict(main.settings), "data.env_config")
    for key, value in main.data.items():
        keys.set(value, f"data.{key}")
    for name, agent in others:
        entry = {
            "base": agent.kind,
            "weight": keys.trained.get(name, 0) / keys.trained[first],
            "env_config": dict(agent.settings),
        }
        keys.set(entry, f"data.mixture.{name}")
    keys.set(max(agent.max_turns for _, agent in rows), "orchestrator.max_turns")


def _validated(keys: TakenKeys, validation: list[str]) -> None:
    n_tasks = keys.numbers("rollout.validation_agent_group_num", [64])
    sizes = keys.numbers("rollout.validation_agent_group_size", [1])
    if len({*n_tasks}) > 1 or len(n_tasks) != len(validation):
        hint = f"give {len(validation)} equal numbers: data.n_eval_tasks is one for all environments"
        raise refused("rollout.validation_agent_group_num", n_tasks, "environments are measured alike", hint)
    if {*sizes} != {1}:
        hint = "set it to 1, and validation_agent_group_num (data.n_eval_tasks) to the number of tasks"
        raise refused("rollout.validation_agent_group_size", sizes, "a held-out task is played once, greedily", hint)
    keys.set(n_tasks[0], "data.n_eval_tasks")


def _fixed(keys: TakenKeys) -> None:
    """Keys of which one value has a counterpart."""
    for name, accepted, reason, hint in FIXED:
        value = keys.take(name, accepted)
        if value != accepted:
            raise refused(name, value, reason, hint)


def _is_agent(section: Any) -> bool:
    return isinstance(section, Mapping) and "agent_type" in section


def _composed(tree: Mapping[str, Any], read_file: ReadFile) -> dict[str, Any]:
    """Merge a file with those of its Hydra `defaults`, which come first unless `_self_` comes before them."""
    names = tree.get("defaults", ["_self_"])
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise ConversionError("defaults of GRL's configuration is not a list of file names", "give [agents, _self_]")
    own, whole = {key: value for key, value in tree.items() if key != "defaults"}, dict[str, Any]()
    for name in names if "_self_" in names else [*names, "_self_"]:
        whole = _merged(whole, own if name == "_self_" else _composed(read_file(name), read_file))
    return whole


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees; lists and values of `over` replace those of `base`."""
    made = dict(base)
    for key, value in over.items():
        before = made.get(key)
        made[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return made


def _flat(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Flatten sections to dotted keys under their present names. Raises ConversionError for a key under two names."""
    made = dict[str, Any]()
    for key, value in tree.items():
        inner = _flat(value, f"{at}{key}.") if isinstance(value, Mapping) else {_present(f"{at}{key}"): value}
        if twice := made.keys() & inner.keys():
            raise ConversionError(f"GRL's configuration gives {min(twice)} under two names", "remove the older one")
        made |= inner
    return made


def _present(name: str) -> str:
    if name in OLDER_KEYS:
        return OLDER_KEYS[name]
    section = next((old for old in OLDER_SECTIONS if name.startswith(old)), None)
    return name if section is None else OLDER_SECTIONS[section] + name.removeprefix(section)
