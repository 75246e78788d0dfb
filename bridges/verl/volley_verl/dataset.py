"""Tasks of an environment service as verl's dataset: `data.custom_cls`.

`data.train_files` and `data.val_files` name splits, ENV/SPLIT, instead of files. Rows are what verl's own dataset
gives; verl's own `collate_fn` batches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from volley_verl import settings
from volley_verl.episode import Episode, Task
from volley_verl.service import Service, wait_for
from volley_verl.settings import AGENT, SettingsError


class CustomEnvironmentDataset(Dataset):
    """Dataset of the tasks of splits, one after the other.

    The first messages of a task are asked for when its row is read, in an episode that is deleted again.

    Args:
        data_files: splits to read, as ENV/SPLIT or ENV@VERSION/SPLIT.
        config: verl's section `data`; see `settings` for the address of the service.
        max_samples: number of rows to keep, drawn as verl does if `config.shuffle`; -1 keeps all.

    Raises:
        SettingsError: a split is not of that form, or a setting of `config` cannot be honoured.
        ServiceError: the service does not know a split, or cannot be reached.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        config = config or {}
        if config.get("filter_overlong_prompts"):
            raise SettingsError(
                "data.filter_overlong_prompts would open every task once: the agent loop refuses prompts that are too "
                "long when they are played; set it to false"
            )
        self._url = settings.env_url(config)
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self._tasks = wait_for(lambda: self._list([_split(str(file)) for file in files]))
        if 0 < max_samples < len(self._tasks):
            self._tasks = [self._tasks[i] for i in _chosen(len(self._tasks), max_samples, config)]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, item: int) -> dict[str, Any]:
        env, split, index = self._tasks[item]
        messages, tools = wait_for(lambda: self._opening(Task(env, split, index, 0)))
        return {
            "raw_prompt": messages,
            "agent_name": AGENT,
            "data_source": env,
            "reward_model": {"style": "rule", "ground_truth": f"{env}/{split}/{index}"},
            "extra_info": {"env": env, "split": split, "index": index, "tools": tools},
            "index": item,
            "tools_kwargs": {},
            "interaction_kwargs": {},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }

    async def _list(self, splits: Sequence[tuple[str, str]]) -> list[tuple[str, str, int]]:
        async with Service(self._url) as service:
            sizes = [
                int((await service.post(f"/{env}/num_tasks", {"split": split}))["num_tasks"]) for env, split in splits
            ]
        return [(env, split, index) for (env, split), size in zip(splits, sizes, strict=True) for index in range(size)]

    async def _opening(self, task: Task) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with Service(self._url) as service, Episode(service, task) as episode:
            return [dict(one) for one in episode.messages], [dict(one) for one in episode.tools]


def _split(name: str) -> tuple[str, str]:
    env, slash, split = name.rpartition("/")
    if not slash or not env or "/" in env or not split:
        raise SettingsError(f"data.train_files and data.val_files name splits as ENV/SPLIT, not {name!r}")
    return env, split


def _chosen(n: int, n_kept: int, config: Mapping[str, Any]) -> Sequence[int]:
    if not config.get("shuffle"):
        return range(n_kept)
    generator = torch.Generator()
    if (seed := config.get("seed")) is not None:
        generator.manual_seed(int(seed))
    return torch.randperm(n, generator=generator)[:n_kept].tolist()
