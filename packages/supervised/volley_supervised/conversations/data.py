"""Tokenized conversations of a warm start or of a run, from files or from an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from services.trainer.waiter import Waiter
from shared.clients.env import DemonstrationReply
from shared.errors import ConfigError, RateLimited, VolleyError
from shared.files import storage
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.run import checkpoint_files
from shared.run_config import section_of
from shared.schema import RunConfig
from volley_supervised.conversations.dataset import Dataset, Example, Kind, TooLong, digest, split, tokenized
from volley_supervised.conversations.demonstrations import Demonstrator, all_of, as_records, fetch
from volley_supervised.conversations.files import Split, files_of, records
from volley_supervised.sections import SftSection

TRAIN: Split = "train"
EVAL: Split = "eval"
_log = telemetry.Log("conversations")
_NAMED = 50


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Sources and limits of the data.

    Trains on `train` files, or, without any, on `n_demonstrations` of the training split of `env`. Evaluates on
    `held_out` files and on the share `held_out_fraction` of the training data. `longest` is in tokens.
    """

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    held_out_fraction: float
    kind: Kind
    longest: int
    too_long: TooLong
    seed: int
    env: str
    n_demonstrations: int


@dataclass(frozen=True, slots=True)
class RunData:
    """Training and held-out examples of a run.

    `digest` is that of all their tokens. `eval` is the data of the evaluation files, a part of `held_out`. `files` are
    the digests of all files, by path: if `digest` changes, they identify the changed file.
    """

    train: Dataset
    held_out: Sequence[Example]
    eval: Dataset | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest([self.train.examples, self.held_out]))

    def counts(self) -> dict[str, int]:
        """Counts for the log; those of evaluation files begin with `eval_`."""
        of_files = self.eval.counts_of_changed() if self.eval else {}
        counts = self.train.counts() | {"eval_examples": len(self.held_out)}
        return counts | {f"eval_{name}": count for name, count in of_files.items()}


def data_settings(config: RunConfig) -> DataSettings:
    """Read the settings. A warm start holds nothing out: RL evaluates by solved tasks."""
    sft, alone = section_of(config, SftSection), config.is_supervised
    return DataSettings(
        train=sft.train,
        held_out=sft.eval if alone else (),
        held_out_fraction=sft.eval_fraction if alone else 0.0,
        kind="pairs" if config.mode == "dpo" else "conversations",
        longest=max(config.trainer.length_buckets),
        too_long=sft.too_long,
        seed=config.run.seed,
        env=config.data.env,
        n_demonstrations=sft.n_demonstrations,
    )


async def load(
    settings: DataSettings,
    tokenizer: ChatTokenizer,
    client: Demonstrator | None,
    waiter: Waiter,
    kept: Path | None = None,
) -> RunData:
    """Read, tokenize and split the data.

    Args:
        client: source of demonstrations if there are no files.
        kept: file that stores the demonstrations, so that a resumed run has the same ones.

    Raises:
        ConfigError: a record cannot be read or trained on; names its place.
        NotFound: no such environment.
        Unavailable: a stop while the environment was unavailable.
    """
    found = records(settings.train, "train") if settings.train else await _shown(settings, client, waiter, kept)
    return await waiter.blocking(_read, settings, tokenizer, found)


async def _shown(
    settings: DataSettings, client: Demonstrator | None, waiter: Waiter, kept: Path | None
) -> Iterable[tuple[str, Any]]:
    if kept is None or not await asyncio.to_thread(kept.exists):
        if client is None:
            raise ConfigError(f"{kept} is missing", "start a run with another name")
        retrying = RetryingDemonstrator(client, waiter)
        made = as_records(settings.env, await fetch(retrying, settings.env, settings.n_demonstrations, settings.seed))
        if kept is None:
            return made
        text = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for _, record in made)
        await waiter.retry_until_stopped(lambda: asyncio.to_thread(storage.replace, kept, text))
    return records([kept], "train")


def _read(settings: DataSettings, tokenizer: ChatTokenizer, found: Iterable[tuple[str, Any]]) -> RunData:
    def rendered(of: Iterable[tuple[str, Any]]) -> Dataset:
        return tokenized(tokenizer, of, settings.kind, settings.longest, settings.too_long)

    whole = rendered(found)
    train, held_out = split(whole.examples, settings.held_out_fraction, settings.seed)
    files = rendered(records(settings.held_out, "eval")) if settings.held_out else None
    if n := sum(one.n_without_tools for one in (whole, files) if one):
        _log.warning("the chat template omits the tools, so the model does not see them", conversations=n)
    for name, one in (("train", whole), ("eval", files)):
        if one and one.unused:
            _log.info("columns not used", data=name, columns=", ".join(one.unused[:_NAMED]), n=len(one.unused))
        if one and one.n_prompt_kept:
            _log.warning("answers begin with the text of their prompt, and keep it", data=name, rows=one.n_prompt_kept)
    digests = {
        str(file.absolute()): checkpoint_files.digest(file)
        for paths, name in ((settings.train, TRAIN), (settings.held_out, EVAL))
        for path in paths
        for file in files_of(path, name)
    }
    return RunData(replace(whole, examples=train), [*held_out, *(files.examples if files else ())], files, digests)


@dataclass(slots=True)
class RetryingDemonstrator:
    """Client of the environment service that retries each call alone, so that fetched demonstrations are kept.

    Demonstrations that cannot be had together (no such route, too many bytes, too slow) are asked for one at a time,
    and so are all later ones, unless the service was only busy.
    """

    client: Demonstrator
    waiter: Waiter
    is_together: bool = True

    async def num_tasks(self, env: str, split: str) -> int:
        return await self.waiter.retry_until_stopped(lambda: self.client.num_tasks(env, split))

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply:
        return await self.waiter.retry_until_stopped(lambda: self.client.demonstration(env, split, index))

    async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]:
        if self.is_together:
            try:
                return await self.client.demonstrations(env, split, indices)
            except VolleyError as error:
                self.is_together = isinstance(error, RateLimited)
                _log.info("asking for demonstrations one at a time", reason=str(error))
        return await all_of(self.demonstration(env, split, index) for index in indices)
