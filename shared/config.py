"""Load the configuration: layered YAML and `key.path=value` overrides, merged by OmegaConf, validated by pydantic.

Every error is one line that names the key, or the file and the line. OmegaConf is imported when a configuration is
loaded, so that `--help` stays instant.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import ValidationError

from shared import removed_keys
from shared.config_files import PROJECT, is_plain, present, read_tree, translated
from shared.config_mistakes import check_form, explained
from shared.errors import ConfigError
from shared.hints import hint_for
from shared.run import pinned, rule_files
from shared.run.folder import RunFolder
from shared.run.pinned import Flat
from shared.run.sources import is_source, resolved
from shared.run_config import paths_of, run_model
from shared.schema import RunConfig
from shared.services_schema import Tls, TokenFiles

_MODEL = "model.path"
_PATHS = (
    _MODEL,
    "data.train",
    "data.eval",
    "run.dir",
    "rollout.weights_root",
    "services.redis_password_file",
    "services.env.folder",
    "services.env.remote_tokens_file",
    *(f"services.token_files.{role}" for role in TokenFiles.model_fields),
    *(f"services.tls.{file}" for file in Tls.model_fields),
)
_FOUND_BESIDE = (_MODEL, "data.env", "data.train", "data.eval")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated run configuration, its plain tree and the tree's hash.

    `notes` are sentences of a command that prepared it. `choices` are keys for which Volley chose a value, with the
    reason (volley.choices).
    """

    config: RunConfig
    tree: dict[str, Any]
    notes: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        return yaml.dump(self.tree, Dumper=_ConfigDumper, sort_keys=True, allow_unicode=True)


class _ConfigDumper(yaml.SafeDumper):
    """Writes text of several lines as it is."""


def _represented(dumper: _ConfigDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ConfigDumper.add_representer(str, _represented)


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the two arguments of every command that takes a configuration."""
    parser.add_argument(
        "--config",
        action="append",
        required=required,
        metavar="FILE.yaml",
        help="run configuration; given again, the later file wins",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the files")


def load(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Merge the tree `base`, the files in order, the tree `given`, then the overrides.

    Raises ConfigError naming the wrong file, key or value.
    """
    trees = [_found_beside(read_tree(Path(path), "config file"), Path(path).parent) for path in paths]
    sources = [f"config file {path}" for path in paths]
    if given:
        sources, trees = [*sources, "the command line"], [*trees, dict(given)]
    whole: Any = dict(base or {})
    for source, tree in zip(sources, trees, strict=True):
        with translated(source):
            whole = _merged(whole, tree)
    whole = _overridden(whole, overrides)
    with _in_file(() if given else paths, overrides):
        return _sourced(validate(whole), Path.cwd())


def _found_beside(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Find model and data that are not in the present directory beside the configuration file, or with Volley."""
    for key in _FOUND_BESIDE:
        section, _, leaf = key.partition(".")
        values = tree.get(section)
        value = values.get(leaf) if isinstance(values, dict) else None
        if isinstance(value, str) and "${" not in value and value and not Path(value).exists():
            name = value.partition("@")[0]
            base = folder if (folder / name).exists() else PROJECT
            if (folder / name).exists() or present(Path(name)) != Path(name):
                tree[section] = {**tree[section], leaf: os.path.normpath((base / value).absolute())}
    if rules := rule_files.found_beside(tree, folder):
        return rule_files.replaced(tree, rules)
    return tree


@contextmanager
def _in_file(paths: Sequence[str | Path], overrides: Sequence[str]) -> Iterator[None]:
    """Name the file in a ConfigError if the whole configuration comes from that file."""
    try:
        yield
    except ConfigError as error:
        if len(paths) != 1 or overrides:
            raise
        raise ConfigError(f"config file {paths[0]}: {error.detail}", error.hint) from error


def _sourced(loaded: LoadedConfig, base: Path) -> LoadedConfig:
    """Replace files and import paths: of environments by names, of rules by their text. Raises ConfigError."""
    if texts := rule_files.resolved(loaded.tree, base):
        loaded = validate(rule_files.replaced(loaded.tree, texts))
    if not any(map(is_source, loaded.config.data.environments)):
        return loaded
    tree = resolved(loaded.tree, base)
    return loaded if tree is None else validate(tree)


def _merged(base: Any, over: Any) -> Any:
    """Merge two OmegaConf trees. Raises TypeError naming the key where a list meets a mapping."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.merge(base, over)
    except TypeError as error:
        base, over = (OmegaConf.to_container(OmegaConf.create(tree)) for tree in (base, over))
        raise TypeError(_conflict(base, over) or str(error)) from error


def _conflict(base: Any, over: Any, at: str = "") -> str | None:
    """Describe the first key that holds a list in one tree and a mapping in the other."""
    if {type(base), type(over)} == {list, dict}:
        return f"{at}: a list and a mapping cannot be merged"
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return None
    found = (_conflict(base[key], over[key], f"{at}.{key}" if at else str(key)) for key in base.keys() & over.keys())
    return next(filter(None, found), None)


def _overridden(tree: Any, overrides: Sequence[str]) -> Any:
    """Apply overrides. Raises ConfigError naming the one that cannot be used."""
    from omegaconf import OmegaConf

    for n, override in enumerate(overrides):
        check_form(overrides[n:])
        key, _, value = override.partition("=")
        check_text("override", override)
        if found := hint_for(key, value):
            raise ConfigError(f"override {override[:200]!r}: {found[0]}", found[1])
        with translated(f"override {override[:200]!r}"):
            tree = _merged(tree, OmegaConf.from_dotlist([override]))
    return tree


def recorded(path: Path) -> LoadedConfig:
    """Load the configuration in an untrusted run folder. Raises ConfigError.

    It opens no path that the configuration names, and inserts no environment variable.
    """
    tree = read_tree(path, "config file")
    if not is_plain(tree):
        raise ConfigError(f"config file {path} holds more than plain values", "a run's own configuration has no ${…}")
    with _in_file([path], ()):
        return validate(tree)


def stored(folder: Path, overrides: Sequence[str] = (), files: Sequence[Path] = ()) -> LoadedConfig:
    """Load the configuration in a run's folder, with absolute paths; later `files` and `overrides` win over it.

    Relative paths in it are resolved against the folder where the run was started, those in `files` and `overrides`
    against the present directory. Raises ConfigError.
    """
    was = rooted(load([RunFolder(folder).config]), _started_in(RunFolder(folder).record))
    if not (overrides or files):
        return was
    tree: Any = was.tree
    for path in files:
        added = read_tree(path, "config file")
        with translated(f"config file {path}"):
            tree = _merged(tree, added)
    return rooted(_sourced(validate(_overridden(tree, overrides)), Path.cwd()), Path.cwd())


def rooted(loaded: LoadedConfig, base: Path) -> LoadedConfig:
    """Make all relative paths absolute, resolved against `base`. A hub id that is not a folder there is kept."""
    values: dict[str, Any] = {}
    for key in _PATHS:
        value: Any = loaded.config
        for part in key.split("."):
            value = getattr(value, part, None)  # of a section that is not given
        if value is not None and not Path(value).is_absolute() and (key != _MODEL or is_folder(str(value), base)):
            values[key] = os.path.normpath(base.absolute() / value)
    for key, server in loaded.config.services.orchestrator.all_teachers().items():
        if server.token_file is not None and not server.token_file.is_absolute():
            values[f"{key}.token_file"] = os.path.normpath(base.absolute() / server.token_file)
    for key, paths in paths_of(loaded.config).items():
        if any(not path.is_absolute() for path in paths):
            values[key] = [os.path.normpath(base.absolute() / path) for path in paths]
    return replace(changed(loaded, values), notes=loaded.notes) if values else loaded


def is_folder(model: str, base: Path) -> bool:
    """True for a folder (existing or not, resolved against `base`) or a run's version; False for a hub id."""
    return "@" in model or model.startswith((".", "/")) or model.count("/") != 1 or (base / model).is_dir()


def _started_in(record: Path) -> Path:
    """Return the folder where a run was started, from its run.json; the present directory if that does not say."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Path(orjson.loads(record.read_bytes())["cwd"])
    return Path.cwd()


def changed(loaded: LoadedConfig, values: Mapping[str, Any]) -> LoadedConfig:
    """Return the configuration with other values, by dotted key. Raises ConfigError."""
    tree = copy.deepcopy(loaded.tree)
    for key, value in values.items():
        check_text(key, value)
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            inner = node.get(parent)
            node[parent] = node = inner if isinstance(inner, dict) else {}
        node[leaf] = value
    return replace(validate(tree), choices=loaded.choices)


def check_text(key: str, value: Any) -> None:
    """Raise ConfigError for text that cannot be recorded: a path whose bytes are not UTF-8."""
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{key} {str(value)!r} is not UTF-8, so the run cannot record it",
            "rename the folder or file, or work in another folder",
        ) from error


def apply_settings(config: RunConfig, settings: Flat) -> RunConfig:
    """Apply the settings that may change during a run.

    The algorithm is replaced as a whole, because another algorithm has other keys. Raises ConfigError.
    """
    emptied: dict[str, Any] = {"algorithm": {}} if "algorithm.name" in settings else {}
    may = {key: value for key, value in settings.items() if pinned.rule_of(key).may}
    return changed(LoadedConfig(config, orjson.loads(config.model_dump_json())), emptied | may).config


def validate(tree: Any) -> LoadedConfig:
    """Validate a plain or OmegaConf tree. Raises ConfigError."""
    with translated("the configuration"):
        plain: Any = dict(tree) if isinstance(tree, dict) else _resolved(tree)
        plain = removed_keys.without_in(plain) if isinstance(plain, dict) else plain
    try:
        return LoadedConfig(run_model().model_validate(plain), plain)
    except ValidationError as error:
        raise explained(error) from error


def _resolved(tree: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(tree, resolve=True) if OmegaConf.is_config(tree) else tree
