"""Converter of GRL's configurations: each key is mapped, without effect, or refused by its name."""

from __future__ import annotations

import copy
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import yaml

from shared import config
from shared.config import LoadedConfig
from shared.schema import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "bridges" / "grl"))

from volley_grl.__main__ import convert, main
from volley_grl.errors import ConversionError
from volley_grl.keys import COPIED, FIXED, NEUTRAL, OLDER_KEYS
from volley_grl.translation import Translation, translate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "bridges/grl/examples/sokoban_ppo.yaml"
GAME = {"max_turns": 6, "max_actions_per_turn": 5, "max_actions_all_turns": 10, "format_penalty": -0.1}
AGENTS = {
    "small": {
        "agent_type": "sokobanAgent",
        "agent_config": {**GAME, "system_prompt": "S", "prompt": "P", "enable_think": True, "max_tokens": 100},
        "env_config": {"dim_room": [6, 6], "num_boxes": 1, "max_steps": 100, "grid_vocab": {"#": "wall"}},
    },
    "large": {"agent_type": "sokobanAgent", "agent_config": GAME, "env_config": {"dim_room": [8, 8]}},
    "blocks": {"agent_type": "blocksworldAgent", "agent_config": GAME, "env_config": {"render_mode": "2d_compact"}},
    "boxes": {"agent_type": "tetrisAgent", "agent_config": GAME, "env_config": {"box_type": 1}},
    "words": {"agent_type": "gsm8kAgent", "agent_config": {"max_turns": 5}, "env_config": {"split": "train"}},
    "sql": {"agent_type": "birdAgent", "agent_config": {}, "env_config": {"dataset_path": "rows.json"}},
    "shop": {"agent_type": "webshopAgent", "agent_config": {}, "env_config": {}},
    "drawn": {"agent_type": "blocksworldAgent", "agent_config": GAME, "env_config": {"render_mode": "2d_sparse"}},
}
BASE = {
    "defaults": ["agents", "_self_"],
    "rollout": {
        "agent_group_num": [8],
        "agent_group_size": [16],
        "training": ["small"],
        "validation": ["small"],
        "validation_agent_group_num": [128],
        "validation_agent_group_size": [1],
        "truncation": "left",
        "rollout_filter_ratio": 0.25,
        "rollout_filter_type": "std_rev",
        "reward_normalization": {"grouping": "batch", "method": "mean_std"},
        "num_env_threads": 4,
    },
    "cluster": {
        "mesh": {"shape": [2, 2], "axes": ["fsdp", "tp"]},
        "training_config": {
            "mini_batch_size": 32,
            "training_micro_batch_size": 4,
            "eval_every_n_steps": 80,
            "max_steps": -1,
        },
        "rollout_config": {"train": {"max_prompt_length": 2048, "total_generation_steps": 100, "top_k": None}},
    },
    "trainer": {
        "ppo": {"num_ppo_epochs": 1, "gamma": 0.99, "gae_lambda": 0.9, "beta": 0.001, "kl_method": "kl", "epsilon": 0.2}
        | {"epsilon_low": 0.1, "epsilon_high": 0.28, "epsilon_c": 3.0, "clip_range_value": 0.5, "entropy_coef": 0.001},
        "optim": {
            "gradient_accumulation_steps": 8,
            "actor_lr": 1e-6,
            "critic_lr": 1e-5,
            "b2": 0.999,
            "type": "constant",
        },
    },
    "model": {"repo_id": "Qwen/Qwen2.5-0.5B-Instruct"},
}


def made(tmp_path, changes=(), base=None, **own) -> Translation:
    """Convert GRL's file with values set or removed (None) at dotted keys."""
    tree = copy.deepcopy(BASE if base is None else base)
    for key, value in dict(changes).items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    (tmp_path / "agents.yaml").write_text(yaml.safe_dump(AGENTS, allow_unicode=True), encoding="utf-8")
    path = tmp_path / "grl.yaml"
    path.write_text(yaml.safe_dump(tree | own, allow_unicode=True), encoding="utf-8")
    return convert(path)


def load(tmp_path, changes=(), base=None, **own) -> LoadedConfig:
    """Load what Volley makes of GRL's file."""
    return loaded(tmp_path, made(tmp_path, changes, base, **own))


def loaded(tmp_path, found: Translation) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(found.tree, allow_unicode=True), encoding="utf-8")
    return config.load([path])


def test_the_example_runs_on_the_warm_start_of_sokoban(tmp_path, capsys):
    ours = config.load([ROOT / "recipes/sokoban/config.yaml"]).config
    assert main([str(EXAMPLE)]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    theirs = config.load([tmp_path / "run.yaml"]).config
    assert theirs.sft == ours.sft
    assert theirs.algorithm.name == "ppo"
    shared = {key: theirs.data.env_config[key] for key in ours.data.env_config}
    assert shared == ours.data.env_config


def test_what_grl_trains_is_what_the_translation_trains(tmp_path):
    run = load(tmp_path).config
    assert (run.data.env, run.model.path) == ("sokoban", "Qwen/Qwen2.5-0.5B-Instruct")
    assert run.data.env_config | {"prompt": ""} == {
        "protocol": "grl",
        "think": True,
        "system_prompt": "S",
        "prompt": "",
        "max_turns": 6,
        "max_actions_per_turn": 5,
        "max_actions": 10,
        "format_penalty": -0.1,
        "dim_room": [6, 6],
        "num_boxes": 1,
        "min_solution": 1,
    }
    assert run.data.env_config["prompt"].startswith("P\n")
    section = run.algorithm
    assert (section.name, section.gamma, section.gae_lambda, section.whiten_advantages) == ("ppo", 0.99, 0.9, True)
    assert (section.epsilon, section.epsilon_high, section.epsilon_c) == (0.1, 0.28, 3.0)
    assert (section.beta, section.kl_in, section.kl_loss_mode) == (0.001, "reward", "kl")
    assert (section.reward_normalization.grouping, section.reward_normalization.method) == ("batch", "mean_std")
    assert section.critic_optimizer_config.learning_rate == 1e-5
    assert section.critic_optimizer_config.b2 == run.trainer.optimizer_config.b2 == 0.999
    generation = run.orchestrator.generation
    assert (generation.mode, generation.truncation) == ("turn_synchronous", "left")
    assert (generation.filters.rollout_filter_ratio, generation.filters.rollout_filter_type) == (0.25, "std_rev")
    assert (run.trainer.groups_per_step, run.grpo_config.num_generations) == (2, 16)
    assert (run.trainer.max_steps, run.orchestrator.eval_every_n_steps, run.data.n_eval_tasks) == (200, 10, 128)
    assert (run.trainer.mesh.shape, run.trainer.mesh.axis_names) == ((2, 2), ("fsdp", "tp"))
    assert (run.rollout.engine.context_length, run.grpo_config.max_response_length) == (2149, 100)


def test_the_plan_for_tunix_is_read_too(tmp_path):
    plan = {
        "rollout": {"agent_group_num": [4], "agent_group_size": [2], "training": ["small"], "validation": ["small"]}
        | {"max_prompt_length": 256, "max_tokens_to_generate": 768, "top_k": 50, "kv_cache_size": 1280},
        "mesh": {"dims": [[1, 4], ["fsdp", "tp"]]},
        "grpo": {"num_generations": 2, "num_iterations": 1, "beta": 0.08, "epsilon": 0.2},
        "training": {
            "max_steps": 3738,
            "num_batches": 3738,
            "optimizer": {"type": "adamw", "learning_rate": 3e-6, "b2": 0.99, "warmup_steps": 374},
            "checkpoint": {"ckpt_dir": "/c", "save_interval_steps": 500, "max_to_keep": 4},
        },
        "lora": {"rank": 64, "alpha": 64.0},
        "cluster": {"role_to_mesh": {"actor": "mesh", "rollout": "mesh"}},
        "data": {"batch_size": 1},
        "model": {"repo_id": "google/gemma-2-2b-it"},
        **AGENTS,
    }
    found = made(tmp_path, base=plan)
    run = loaded(tmp_path, found).config
    assert (run.algorithm.name, run.algorithm.beta, run.algorithm.kl_in) == ("grpo", 0.08, "loss")
    assert (run.grpo_config.num_generations, run.trainer.groups_per_step, run.grpo_config.off_policy_steps) == (2, 4, 0)
    assert (run.trainer.max_steps, run.trainer.optimizer_config.warmup_steps) == (3738, 374)
    assert (run.trainer.lora.rank, run.trainer.mesh.shape) == (64, (1, 4))
    assert (run.rollout.sampling.top_k, run.rollout.engine.context_length) == (50, 1025)
    assert any("kv_cache_size" in note for note in found.notes)


def test_several_agents_are_a_mixture_and_those_only_validated_have_no_weight(tmp_path):
    changes = {
        "rollout.training": ["small", "blocks"],
        "rollout.agent_group_num": [6, 2],
        "rollout.agent_group_size": [16, 16],
    }
    changes |= {"rollout.validation": ["small", "large", "boxes"], "rollout.validation_agent_group_num": [64] * 3}
    data = load(tmp_path, changes).config.data
    assert data.env == "sokoban"
    assert {name: (row.base, row.weight) for name, row in data.mixture.items()} == {
        "blocks": ("blocksworld", 2 / 6),
        "large": ("sokoban", 0.0),
        "boxes": ("tetris", 0.0),
    }
    assert data.mixture["blocks"].env_config["render"] == "2d"


def test_data_sets_of_questions(tmp_path):
    words = load(tmp_path, {"rollout.training": ["words"], "rollout.validation": ["words"]}).config.data
    assert (words.env, words.env_config["correct_reward"], words.env_config["wrong_reward"]) == ("gsm8k", 10.0, -0.1)
    sql = load(tmp_path, {"rollout.training": ["sql"], "rollout.validation": ["sql"]}).config.data
    assert (sql.env, sql.train, sql.env_config["retry_factor"]) == ("text_to_sql", Path("rows.json"), 0.5)


def test_keys_without_effect_are_noted_with_the_reason(tmp_path):
    notes = made(tmp_path).notes
    assert any(note.startswith("rollout.num_env_threads: ") for note in notes)
    assert any("small.agent_config.max_tokens" in note for note in notes)
    assert any("trainer.ppo.epsilon:" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.truncation": "right"}, r"rollout\.truncation=right"),
        ({"rollout.validation_agent_group_size": [2]}, r"rollout\.validation_agent_group_size"),
        ({"rollout.agent_group_num": [8, 8]}, r"rollout\.training"),
        ({"rollout.agent_group_num": ["8"]}, r"rollout\.agent_group_num"),
        ({"rollout.training": ["large2"]}, r"large2"),
        ({"rollout.training": ["shop"]}, r"shop\.agent_type=webshopAgent"),
        ({"rollout.training": ["drawn"]}, r"drawn\.env_config\.render_mode=2d_sparse"),
        ({"rollout.rollout_filter_ratio": 0.01}, r"rollout\.rollout_filter_ratio=0\.01"),
        ({"rollout.rollout_filter_ratio": 2}, r"rollout\.rollout_filter_ratio=2"),
        ({"rollout.reward_normalization.method": "mean"}, r"rollout\.reward_normalization\.method=mean"),
        ({"rollout.bogus": 1}, r"rollout\.bogus"),
        ({"cluster.rollout_engine": "vllm"}, r"cluster\.rollout_engine=vllm"),
        ({"cluster.role_to_mesh": {"actor": {"shape": [1]}}}, r"cluster\.role_to_mesh"),
        ({"cluster.training_config.mini_batch_size": 16}, r"mini_batch_size=16"),
        ({"cluster.training_config.max_steps": "many"}, r"max_steps=many"),
        ({"trainer.optim.type": "cosine"}, r"trainer\.optim\.type=cosine"),
        ({"ppo": {"gamma": 1.0}}, r"trainer\.ppo\.gamma under two names"),
        ({"grpo": {"beta": 0.1}}, r"grpo and trainer\.ppo"),
        ({"actor_rollout_ref": {"model": {}}}, r"actor_rollout_ref is a section of GRL's configuration for verl"),
        ({"defaults": "agents"}, r"defaults"),
        ({"cluster.mesh": {"dims": [1, 1]}}, r"mesh\.dims=\[1, 1\] of GRL's configuration: it is not \[shape, names"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConversionError, match=message) as error:
        made(tmp_path, changes)
    assert error.value.hint


def test_an_error_is_one_line(tmp_path, capsys):
    with pytest.raises(OSError, match=r"nothing\.yaml"):
        made(tmp_path, {"defaults": ["nothing"]})
    assert main([str(tmp_path / "grl.yaml")]) == 1
    assert "nothing.yaml" in capsys.readouterr().err
    (tmp_path / "grl.yaml").write_text("[]", encoding="utf-8")
    assert main([str(tmp_path / "grl.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_keys_of_volley_go_over_the_translation(tmp_path):
    run = load(tmp_path, volley={"trainer": {"max_steps": 3}, "run": {"name": "mine"}}).config
    assert (run.trainer.max_steps, run.run.name, run.trainer.groups_per_step) == (3, "mine", 2)


def test_every_target_is_a_key_of_volley():
    for target in {target for targets in COPIED.values() for target in targets}:
        models = [RunConfig]
        for part in target.split("."):
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            assert fields, target
            models = [section for one in fields for section in _sections(one.annotation)]


def _sections(annotation):
    """Sections in a type."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def test_the_page_names_every_key_of_grl():
    page = (ROOT / "docs/grl.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.,*{} ]+)`", page))
    words = {word.rpartition(".")[2] for one in named for word in re.split(r"[{}, ]+", one)}
    keys = {*COPIED, *NEUTRAL, *(name for name, *_ in FIXED), *OLDER_KEYS}
    assert sorted(key for key in keys if key.rpartition(".")[2] not in words) == []


def paths_of(tree, at=()):
    for key, value in tree.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*at, key))


def test_any_value_at_any_key_is_translated_or_refused():
    whole = {**BASE, **AGENTS, "defaults": []}
    names = ["small", "blocks", "boxes", "words", "sql"]
    whole["rollout"] = whole["rollout"] | {"training": names, "agent_group_num": [8] * 5, "agent_group_size": [16] * 5}
    whole["cluster"]["training_config"] = whole["cluster"]["training_config"] | {"mini_batch_size": 160}
    translate(whole, pytest.fail)
    for path in paths_of(whole):
        for value in (None, "x", {"a": {"b": 1}}, [None], 0, 1.5, True, [[1], 2]):
            tree = copy.deepcopy(whole)
            node = tree
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = value
            with suppress(ConversionError):
                translate(tree, lambda name: {})
