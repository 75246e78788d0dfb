"""Roles, resource pool and trainer of both of verl's trainers, for a configuration of `volley_verl.config`.

`python -m verl.trainer.main_ppo` makes the same. verl 0.9.1 has no `RayPPOTrainer(reward_fn=…)` any more: the reward is
in the configuration, and the dataset too.
"""

from __future__ import annotations

from typing import Any

from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role, create_rl_dataset, create_rl_sampler, need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn


def roles(config: Any) -> tuple[dict[Role, Any], ResourcePoolManager]:
    """Return the worker class of each role, and the pool of GPUs that they share.

    The pool is not made yet: `create_resource_pool` needs Ray, and as many GPUs as
    trainer.n_gpus_per_node × trainer.nnodes. Rollout servers take none of them.
    """
    runner = BaseTaskRunner()
    runner.add_actor_rollout_worker(config)
    if need_critic(config):
        runner.add_critic_worker(config)
    runner.add_reward_model_resource_pool(config)
    return runner.role_worker_mapping, runner.init_resource_pool_mgr(config)


def legacy_trainer(config: Any) -> RayPPOTrainer:
    """Make verl's legacy trainer (`trainer.use_v1=false`); then call its `init_workers` and `fit`.

    Raises:
        SettingsError: the configuration lacks an address, or asks for what Volley's servers do not do.
        ServiceError: the environment service cannot be reached.
    """
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    mapping, pool = roles(config)

    def dataset(files: Any, kind: str) -> Any:
        kept = config.data.get(f"{kind}_max_samples", -1)
        return create_rl_dataset(files, config.data, model.tokenizer, model.processor, kind == "train", kept)

    train = dataset(config.data.train_files, "train")
    return RayPPOTrainer(
        config=config,
        tokenizer=model.tokenizer,
        processor=model.processor,
        role_worker_mapping=mapping,
        resource_pool_manager=pool,
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=train,
        val_dataset=dataset(config.data.val_files, "val"),
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, train),
    )


def v1_trainer(config: Any) -> Any:
    """Make verl's present trainer of `trainer.v1.trainer_mode`; then call its `init`, and `fit` with an agent loop.

    TransferQueue has to be started before (`transfer_queue.init`), as verl's own task runner does.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
