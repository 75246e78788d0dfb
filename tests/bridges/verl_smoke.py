"""verl's own classes with Volley's services: `python verl_smoke.py CASE RESULT`.

It runs in verl's environment and imports nothing of Volley but the bridge. CASE is a JSON file: `overrides` for Hydra,
`legacy` ones, `weights` (a safetensors file to send), `turns` (ids of scripted answers) and `tool_task`. RESULT is a
JSON file of what happened.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
import transfer_queue
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from safetensors.torch import load_file
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.reward_loop import RewardLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import TokenOutput
from volley_verl.agent_loop import EnvironmentAgentLoop
from volley_verl.dataset import CustomEnvironmentDataset
from volley_verl.reward import compute_score
from volley_verl.trainer import legacy_trainer, roles, v1_trainer

N_PROMPTS, N, STEP = 3, 4, 7


def composed(overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    with open_dict(config):
        config.trainer.n_gpus_per_node = 1
        config.actor_rollout_ref.rollout.agent.num_workers = 1
        config.reward.num_workers = 1
        config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    return config


def batch_of(config):
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(N_PROMPTS)]))
    batch.non_tensor_batch["uid"] = np.array([f"prompt-{i}" for i in range(N_PROMPTS)], dtype=object)
    return batch.repeat(N, interleave=True)


def episode(row):
    about, attention, n_prompt = row.non_tensor_batch, row.batch["attention_mask"].bool(), len(row.batch["prompts"])
    kept = attention[n_prompt:]
    return {
        "task": about["reward_model"]["ground_truth"],
        "uid": about["uid"],
        "seed": about["volley_seed"],
        "turns": about["volley_turns"],
        "prompt_ids": row.batch["prompts"][attention[:n_prompt]].tolist(),
        "response_ids": row.batch["responses"][kept].tolist(),
        "mask": row.batch["response_mask"][kept].tolist(),
        "logprobs": row.batch["rollout_log_probs"][kept].tolist(),
        "reward": float(row.batch["rm_scores"].sum()),
        "turn_scores": about["turn_scores"],
        "success": bool(about["acc"]),
    }


def advantages(output, name):
    """Advantages of each episode's sampled tokens, in float64."""
    mask = output.batch["response_mask"].to(torch.float64)
    rewards = output.batch["rm_scores"].to(torch.float64)
    tokens, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=output.non_tensor_batch["uid"]
    )
    return [row[kept].tolist() for row, kept in zip(tokens, mask.bool(), strict=True)]


async def judged(output):
    """Scores of verl's custom reward function, for the recorded turns."""
    made = []
    for i in range(len(output)):
        about = output[i].non_tensor_batch
        info = {**about["extra_info"], "volley_turns": about["volley_turns"], "volley_seed": about["volley_seed"]}
        made.append(await compute_score(about["data_source"], "", about["reward_model"]["ground_truth"], info))
    return [one["score"] for one in made]


def without_rewards(output):
    """The batch as the reward manager gets it from an agent loop without a reward of its own."""
    made = output.select(batch_keys=["prompts", "responses", "attention_mask", "input_ids", "position_ids"])
    about = output.non_tensor_batch
    pairs = zip(about["volley_turns"], about["volley_seed"], strict=True)
    made.non_tensor_batch["tool_extra_fields"] = np.array(
        [{"volley_turns": turns, "volley_seed": seed} for turns, seed in pairs], dtype=object
    )
    return made


def play_batch(config, client):
    batch = batch_of(config)
    output = AgentLoopManager.create(config=config, llm_client=client).generate_sequences(batch)
    about = output.non_tensor_batch
    about.update({key: value for key, value in batch.non_tensor_batch.items() if key not in about})
    scored = RewardLoopManager(config=config, rm_resource_pool=None).compute_rm_score(without_rewards(output))
    return {
        "episodes": [episode(output[i]) for i in range(len(output))],
        "advantages": {name: advantages(output, name) for name in ("grpo", "rloo")},
        "reward_manager": scored.batch["rm_scores"].sum(-1).tolist(),
        "reward_function": asyncio.run(judged(output)),
    }


class Trainer(Worker):
    """Stands in for verl's trainer, which needs a GPU: it has the weights of a file, and verl's checkpoint engine."""

    def __init__(self, file, arguments):
        super().__init__()
        self.file = file
        self.engine = CheckpointEngineRegistry.new("volley", is_master=True, bucket_size=1 << 16, **arguments)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        await self.engine.send_weights(load_file(self.file).items(), global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)


def send_weights(config, servers, file):
    """Send weights by verl's manager, and sample with them."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    arguments = OmegaConf.to_container(engine.engine_kwargs.volley)
    made = RayClassWithInitArgs(cls=ray.remote(Trainer), file=file, arguments=arguments)
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, bin_pack=False, use_gpu=False)
    manager = CheckpointEngineManager(omega_conf_to_dataclass(engine), group, servers.get_replicas())
    manager.update_weights(STEP)
    parameters = {"temperature": 1.0, "logprobs": True, "max_new_tokens": 4}
    output = asyncio.run(servers.get_client().generate("r", prompt_ids=[1, 2, 3], sampling_params=parameters))
    return {
        "output_ids": output.token_ids,
        "logprobs": output.log_probs,
        "step": output.extra_fields["min_global_steps"],
    }


class Scripted:
    """Stands in for verl's client of servers: it gives ids of a script."""

    def __init__(self, turns):
        self.turns = list(turns)

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        ids = self.turns.pop(0)[: sampling_params["max_new_tokens"]]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="stop")


async def play_script(config, task, turns):
    """Play an episode with tools; the model's answers are scripted."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.custom.volley.max_response_length = 100
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    loop = EnvironmentAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=Scripted(turns),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=CustomEnvironmentDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen3",
    )
    output = await loop.run({"temperature": 1.0, "logprobs": True}, extra_info=task)
    return {
        "seed": output.extra_fields["volley_seed"],
        "prompt_ids": output.prompt_ids,
        "response_ids": output.response_ids,
        "mask": output.response_mask,
        "logprobs": output.response_logprobs,
        "reward": output.reward_score,
        "success": bool(output.extra_fields["reward_extra_info"]["acc"]),
    }


def error_of(call):
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return None


def start_trainers(config, legacy):
    """Start both of verl's trainers; without a GPU, each ends at its resource pool."""
    trainer = legacy_trainer(legacy)
    mapping, pool = roles(legacy)
    found = {
        "legacy_roles": sorted(str(role) for role in mapping),
        "pool": pool.resource_pool_spec,
        "n_train": len(trainer.train_dataset),
        "n_val": len(trainer.val_dataset),
        "legacy": error_of(trainer.init_workers),
    }
    config.transfer_queue.enable = True
    transfer_queue.init(config.transfer_queue)
    try:
        present = v1_trainer(config)
        found["v1"] = error_of(present.init)
        found["v1_roles"] = sorted(str(role) for role in present.role_worker_mapping)
        found["steps"] = present.total_training_steps
    finally:
        transfer_queue.close()
    return found


def start_ray(attempts=4):
    """Start Ray; it waits 30 s for its own processes, too short for a busy machine."""
    for attempt in range(1, attempts + 1):
        try:
            return ray.init(num_cpus=16, num_gpus=0, include_dashboard=False)
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out" not in str(error):
                raise
    return None


def main(case, result):
    case = SimpleNamespace(**json.loads(case.read_text(encoding="utf-8")))
    config = composed(case.overrides)
    os.environ["VOLLEY_ENV_URL"] = config.data.volley.env_url
    start_ray()
    try:
        servers = LLMServerManager.create(config=config)
        found = play_batch(config, servers.get_client())
        found["weights"] = send_weights(config, servers, case.weights)
        found["script"] = asyncio.run(play_script(config, case.tool_task, case.turns))
        found["trainers"] = start_trainers(config, composed(case.legacy))
    finally:
        ray.shutdown()
    result.write_text(json.dumps(found, default=float), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
