"""Folders of models: `model.path` is a local folder, RUN@VERSION of another run, or a Hugging Face hub id."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

import orjson

from shared import config, packages
from shared.errors import ConfigError
from shared.files import storage
from shared.models import content, origin
from shared.models.origin import ORIGIN, Origin
from shared.models.weight_files import ADAPTER, check_random, weight_files
from shared.run import checkpoint_files, trust
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.visible import quoted

SMALL = ["*.json", "*.jinja", "*.txt"]
"""Patterns of the files of a model\'s folder that are not weights."""
_INDEX = "*.index.json"  # of weights, which are not copied


def model_folder(path: str, run_folder: Path | None = None, *, weights: bool = False) -> Path:
    """Find the model's folder of `path`; download a hub id (config and tokenizer, with `weights` also the weights).

    For RUN@VERSION it is the copy that `keep` made in `run_folder`, our own run's, or else the other run's model.

    Raises ConfigError if `path` is no folder of a model, no version of a run and no repository that can be reached.
    """
    kept = None if run_folder is None else kept_in(run_folder)
    if (found := origin.find(path, kept)) is not None:
        return kept if kept is not None and origin.read(kept) == found else model_of(found)
    folder = Path(path)
    if folder.is_dir():
        if RunFolder(folder).record.exists() and not (folder / "config.json").exists():
            raise ConfigError(
                f"model.path={path} is the folder of a run, not of a model",
                f"to start from its weights say {path}@{origin.LATEST}",
            )
        return folder.resolve()
    if folder.is_file() and path.lower().endswith(".gguf"):
        made = Path("models") / folder.stem
        raise ConfigError(
            f"model.path {path} is a GGUF file, not a folder",
            f"`volley model get {quoted(path)} {quoted(str(made))}` converts it; then name {quoted(str(made))}",
        )
    if path.startswith((".", "/")) or path.count("/") != 1 or folder.parent.is_dir():
        raise ConfigError(f"model.path {path} is no folder", _local_hint(folder))
    download: Callable[[str, Sequence[str], bool], Path] = packages.part("model_download")
    return download(path, SMALL, weights)


def _local_hint(missing: Path) -> str:
    """Name the folder that was probably meant, or the command that makes it."""
    beside = missing.parent.glob("*/config.json") if missing.parent.is_dir() else iter(())
    if near := get_close_matches(missing.name, [file.parent.name for file in beside], n=1):
        return f"did you mean {quoted(str(missing.with_name(near[0])))}?"
    if "smollm2" in missing.name.lower():
        path = missing if missing.parent.name else Path("models") / missing
        return f"`volley model get smollm2 {quoted(path)}` makes a model of that name; then name {quoted(path)}"
    return "give a Hugging Face folder, a hub id like Qwen/Qwen3-4B, or RUN@VERSION"


def check_weights(run: RunConfig) -> None:
    """Check that a new run can start from the weights of its model's folder. Raises ConfigError.

    Weights of a hub id are checked after the trainer's download.
    """
    folder = Path(run.model.path)
    begun = run.run.bucket is not None or RunFolder(run.run.folder).record.exists()
    if begun or not folder.is_dir():
        return
    if (folder / ADAPTER).is_file():
        weight_files(folder)  # says what to do
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {folder} holds no config.json", "name a Hugging Face folder; `volley model get` downloads one"
        )
    if run.model.initial_weights == "random":
        check_random(folder)
    else:
        weight_files(folder)


def kept_in(run_folder: Path) -> Path:
    """Folder where a run keeps config.json and tokenizer of the run that it started from."""
    return RunFolder(run_folder).model.absolute()


def keep(run: RunConfig) -> Origin | None:
    """Find the version of another run that this run starts from, and copy its config.json and tokenizer.

    None if the run does not start from another run. Nothing is copied once the run has a checkpoint. Raises
    ConfigError, StorageFull.
    """
    kept = kept_in(run.run.folder)
    found = origin.find(run.model.path, kept)
    if (
        found is not None
        and origin.read(kept) != found
        and not checkpoint_files.versions(run.run.folder / origin.CHECKPOINTS)
    ):
        with storage.storage(run.run.folder):
            _copy(found, kept)
    return found


def _copy(found: Origin, kept: Path) -> None:
    """Copy all files or none; config.json is the one of the weights."""
    draft, source = kept.with_name(".tmp-model"), model_of(found)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    copy_small(source, draft)
    model = checkpoint_files.read_manifest(found.checkpoint).model
    (draft / "config.json").write_bytes(orjson.dumps(model, option=orjson.OPT_INDENT_2))
    (draft / ORIGIN).write_bytes(orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
    shutil.rmtree(kept, ignore_errors=True)
    draft.rename(kept)


def _model_inside(folder: RunFolder, run: RunConfig) -> Path:
    """Find the model that a run's folder keeps, or names on the hub. Raises ConfigError."""
    kept = kept_in(folder.path)
    if kept.is_dir() and not kept.is_symlink():
        return kept
    if config.is_folder(run.model.path, folder.path):
        trust.check(folder)
    return model_folder(run.model.path)


def copy_small(source: Path, target: Path) -> None:
    """Copy the files of a model's folder without the weights: configurations, tokenizer, chat template."""
    for pattern in SMALL:
        for file in source.glob(pattern):
            if not file.match(_INDEX) and file.name != ORIGIN:
                shutil.copy(file, target / file.name)


def model_of(found: Origin) -> Path:
    """Find the folder with config.json and tokenizer of a version of another run.

    Raises ConfigError, also if its files have changed since that run began, or if an untrusted run's folder names a
    folder outside.
    """
    folder = RunFolder(Path(found.folder))
    try:
        if trust.is_own(folder):
            run = config.stored(folder.path).config
            model = model_folder(run.model.path, folder.path)
        else:
            run = config.recorded(folder.config).config
            model = _model_inside(folder, run)
        content.check(run.model.content or {}, content.digests(model), model)
    except ConfigError as error:
        raise ConfigError(
            f"model.path={found.path}: the model of run {found.run} cannot be used: {error.detail}", error.hint
        ) from error
    return model
