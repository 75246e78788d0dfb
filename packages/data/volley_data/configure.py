"""From a model, data and rewards to the configuration of a run, for commands and Python alike."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import config as configuration
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.storage import replace
from shared.models.chat import ChatTokenizer
from shared.models.hub import model_folder
from volley.choices import is_given
from volley.layout import CACHE
from volley_data import defaults, sources, trial
from volley_data.archive import PackedData, pack, plain_name
from volley_data.functions import ToolFile, reward_of, tools_of
from volley_data.rows import ColumnTypes, RowTasks, held_out, read, split_by
from volley_serving.templates.prompts import leaves_out

_SHARE, _TURNS_WITH_TOOLS = 0.1, 4
_FOLDER, _NO_DATA = CACHE / "data", {"data": {"env": "rows"}}


def configure(
    model: str | Path | None,
    data: str | None,
    reward: str | Sequence[str],
    *,
    tools: str | None = None,
    columns: Mapping[str, str] | None = None,
    eval_data: str | None = None,
    eval_share: float | None = None,
    config: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
) -> LoadedConfig:
    """Make the configuration of a run on own data.

    The rows and the rewards become an environment in the cache, which is checked in this machine's sandbox: every row's
    reward is computed once. Files of `config` and `overrides` win over the settings chosen here.

    Args:
        model: a folder or a hub id; None if a file of `config` names it.
        data: a file, a folder or a hub id.
        reward: FILE.py, FILE.py:NAME or FILE.py:NAME=WEIGHT, or several.
        tools: FILE.py, FILE.py:FUNCTION or FILE.py:CLASS.
        columns: column of the data by the name that rewards know it by.
        eval_data: held-out tasks: a file, a folder, or the name of a split of `data`.
        eval_share: share of the prompts to hold out, if there is no `eval_data`; 0 holds out none.

    Raises ConfigError: the first mistake in data, rewards or settings.
    """
    rewards = [reward_of(one) for one in ([reward] if isinstance(reward, str) else reward)]
    if not rewards:
        raise ConfigError("no reward is given", "add --reward FILE.py")
    if data is None:
        raise ConfigError("no data are given", "add --data FILE")
    given: dict[str, Any] = {} if model is None else {"model": {"path": str(model)}}
    box = None if tools is None else _tools(tools, configuration.load(config, overrides, given={**given, **_NO_DATA}))
    chosen = _read(data, columns or {}, eval_data, eval_share)
    for one in rewards:
        one.check(chosen.columns, with_object=box is not None and box.is_class)
    packed = pack({split: part for split, part in chosen.splits.items() if part.tasks}, rewards, box)
    archive = _stored(packed.content, plain_name(data))
    named = ", ".join(one.file.name for one in rewards)
    checked = trial.check(packed.content, archive.parent, named, box.file.name if box else "")
    loaded = configuration.load(config, overrides, given={**given, "data": {"env": str(archive)}})
    held = [eval_data] if eval_data and Path(eval_data).exists() else []
    loaded = _made_of(loaded, [data, *held, *(one.file for one in rewards), *([box.file] if box else [])])
    splits, turns = [*packed.splits.values()], 1 if box is None else box.turns
    loaded = defaults.fitted(loaded, _model_of(loaded), plain_name(data), splits, turns=turns, tools=checked.tools)
    return dataclasses.replace(loaded, notes=(*loaded.notes, *_notes(chosen, packed, checked)))


def _stored(content: bytes, name: str) -> Path:
    """Keep an environment's archive in the cache, under its digest."""
    archive = _FOLDER / hashlib.sha256(content).hexdigest()[:32] / f"{name}.zip"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        replace(archive, content)
    return archive


def with_environment(
    model: str | None, env: str, *, config: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Make the configuration of a run on an environment or agent. Raises ConfigError.

    Args:
        model: a folder or a hub id; None if a file of `config` names it.
        env: a file, a folder, an archive, or the name of a built-in environment.
    """
    given: dict[str, Any] = (
        {"data": {"env": env}} if model is None else {"model": {"path": model}, "data": {"env": env}}
    )
    loaded = configuration.load(config, overrides, given=given)
    folder = _model_of(loaded)
    is_agent = _is_agent(Path(env))
    loaded = defaults.of_environment(loaded, folder, plain_name(env), is_agent=is_agent)
    if is_agent and leaves_out(ChatTokenizer(folder), defaults.ASKED, [defaults.TOOL]):
        note = f"{loaded.config.model.path}: its chat template writes no tools; a system message describes an agent's"
        loaded = dataclasses.replace(loaded, notes=(*loaded.notes, note))
    return loaded


def _is_agent(file: Path) -> bool:
    """Return True for a Python file whose class judges what an agent did, instead of playing steps."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.suffix == ".py" and "def judge(" in file.read_text(encoding="utf-8")
    return False


def _made_of(loaded: LoadedConfig, files: Sequence[str | Path]) -> LoadedConfig:
    """Record the names of the files that the environment was packed from, unless `data.env` was overridden."""
    env, sources = loaded.config.data.env, loaded.tree["data"].get("sources") or {}
    if env not in sources:
        return loaded
    made_of = list(dict.fromkeys(Path(one).name for one in files))
    return configuration.changed(loaded, {"data.sources": {**sources, env: {**sources[env], "made_of": made_of}}})


def _tools(given: str, loaded: LoadedConfig) -> ToolFile:
    """Tools of a file, as the model of the run reads and calls them. Raises ConfigError."""
    turns = loaded.config.orchestrator.max_turns if is_given(loaded, "orchestrator.max_turns") else _TURNS_WITH_TOOLS
    described = defaults.describes_tools(_model_of(loaded))
    return dataclasses.replace(tools_of(given), turns=turns, described=described)


def _model_of(loaded: LoadedConfig) -> Path:
    return model_folder(loaded.config.model.path, loaded.config.run.folder)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Tasks by split, where the held-out ones come from, and notes."""

    splits: Mapping[str, RowTasks]
    how: str
    notes: Sequence[str]

    @property
    def columns(self) -> Sequence[str]:
        """Columns that every split has."""
        first, *others = self.splits.values()
        return [name for name in first.columns if all(name in part.columns for part in others if part.tasks)]


def _read(data: str, columns: Mapping[str, str], eval_data: str | None, share: float | None) -> _Chosen:
    """Read and split the data. Raises ConfigError."""
    if eval_data is not None and share is not None:
        raise ConfigError("--eval-data and --eval-share both choose the held-out tasks", "give one of them")
    if share is not None and not 0 <= share < 1:
        raise ConfigError(f"--eval-share {share:g} is not a share", "give a number from 0 to 1, such as 0.1")
    source, types = sources.find(data), ColumnTypes()
    train = read(source.of(source.train), source.shown, columns, types)
    if eval_data is None and share is None:
        eval_data = source.held_out
    if eval_data is None:
        share = _SHARE if share is None else share
        if share == 0:
            return _Chosen({"train": train}, "none are held out", ())
        rest, out = held_out(train, share, source.shown)
        return _Chosen({"train": rest, "eval": out}, f"a share of {share:g} of the prompts, by their digests", ())
    is_split = eval_data in source.splits and not Path(eval_data).exists()
    other = source if is_split else sources.find(eval_data)
    out = read(other.of(eval_data if is_split else other.train), other.shown, columns, types)
    rest, common = split_by(train, {task.prompt for task in out.tasks})
    if not rest.tasks:
        raise ConfigError(f"all prompts of {source.shown} are held out too", "train and evaluate on different prompts")
    notes = [f"{len(common.tasks)} rows of {source.shown} are left out, because their prompts are held out"]
    how = f"the split {eval_data}" if is_split else eval_data
    return _Chosen({"train": rest, "eval": out}, how, notes if common.tasks else ())


def _notes(chosen: _Chosen, packed: PackedData, checked: trial.RewardTrial) -> list[str]:
    """Sentences on what was chosen, and why."""
    sizes = {split: len(part.tasks) for split, part in packed.splits.items()}
    notes = [f"{sizes['train']} training and {sizes.get('eval', 0)} held-out tasks ({chosen.how})", *chosen.notes]
    for split, part in packed.splits.items():
        before = chosen.splits[split]
        if len(part.tasks) < len(before.tasks) or (len(before.tasks) < before.n_found and "eval" not in packed.splits):
            notes.append(f"{split}: an environment holds {len(part.tasks)} of the {before.n_found} rows")
    rows = sum(sizes.values())
    notes.append(f"the reward was computed on {checked.rows} of {rows} rows in {checked.seconds:.1f} s")
    return notes
