"""Arguments of `volley train`, `volley plan` and `volley config show` for a run on own data or an environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.run.folder import RunFolder

_OF_DATA = ("reward", "tools", "columns", "eval_data", "eval_share")


class DataArguments:
    """The options, and the configuration that they make."""

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(
            "on your own data or environment", "volley train MODEL --data FILE --reward FILE.py, or --env FILE"
        )
        group.add_argument(
            "--env", metavar="FILE|FOLDER|NAME", help="environment or agent, instead of data and rewards"
        )
        group.add_argument(
            "--data", metavar="FILE|FOLDER|HUB_ID", help="JSONL, JSON, CSV, Parquet, or datasets' folder"
        )
        group.add_argument(
            "--reward", action="append", default=[], metavar="FILE.py[:NAME][=WEIGHT]", help="repeatable; added up"
        )
        group.add_argument("--tools", metavar="FILE.py[:NAME]", help="functions, or a class, that the model may call")
        group.add_argument("--columns", metavar="NAME=COLUMN,...", help="other names for columns: prompt=text")
        group.add_argument("--eval-data", metavar="FILE|SPLIT", help="held-out tasks")
        group.add_argument("--eval-share", type=float, metavar="SHARE", help="share of the prompts held out (0.1)")

    @staticmethod
    def configured(arguments: argparse.Namespace, given: Sequence[str]) -> LoadedConfig | None:
        """Make the configuration, if --data or --env is given. Args: given: the model and the overrides.

        Raises ConfigError.
        """
        from volley_data.configure import configure, with_environment

        models = [one for one in given if not _is_override(one)]
        overrides = [one for one in given if _is_override(one)]
        if arguments.data is None:
            for name in _OF_DATA:
                if _is_given(arguments, name):
                    hint = "leave it out: the environment brings its own" if arguments.env else "add --data FILE"
                    raise ConfigError(f"--{name.replace('_', '-')} goes with --data", hint)
            env = _environment(arguments, models, overrides)
            if env is None:
                return None
            model = _model(models, overrides, "--env FILE", configured=bool(arguments.config))
            return with_environment(model, env, config=arguments.config or (), overrides=overrides)
        if arguments.env is not None:
            raise ConfigError("--data and --env both name what to train on", "give one of them")
        return configure(
            _model(models, overrides, "--data FILE --reward FILE.py", configured=bool(arguments.config)),
            arguments.data,
            arguments.reward,
            tools=arguments.tools,
            columns=_columns(arguments.columns),
            eval_data=arguments.eval_data,
            eval_share=arguments.eval_share,
            config=arguments.config or (),
            overrides=overrides,
        )


def _model(models: Sequence[str], overrides: Sequence[str], options: str, *, configured: bool) -> str | None:
    """Return the model of the command line; None if there is none and files configure the run.

    Raises ConfigError if there is none, or more than one.
    """
    named = [*models, *_values("model.path", overrides)[-1:]]
    if not named and configured:
        return None
    if len(named) != 1:
        told = f"{len(named)} models are named: {', '.join(named)}" if named else "no model is named"
        raise ConfigError(told, f"write volley train MODEL {options}")
    return named[0]


def _environment(arguments: argparse.Namespace, models: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return the environment of `--env ENV` or `MODEL data.env=ENV`; None for other commands. Raises ConfigError."""
    named = _values("data.env", overrides)
    if arguments.env is not None:
        if named:
            raise ConfigError("--env and data.env both name the environment", "give one of them")
        if not arguments.env:
            raise ConfigError("--env is empty", "write volley train MODEL --env FILE")
        return str(arguments.env)
    is_model = len(models) == 1 and not arguments.config and not RunFolder(Path(models[0])).record.exists()
    return named[-1] if named and is_model else None


def _values(key: str, overrides: Sequence[str]) -> list[str]:
    """Values of a key in overrides."""
    return [one.partition("=")[2] for one in overrides if one.partition("=")[0] == key]


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) not in (None, [])


def _is_override(text: str) -> bool:
    return "=" in text and "/" not in text.partition("=")[0]


def _columns(text: str | None) -> dict[str, str]:
    """Raises ConfigError."""
    found = dict[str, str]()
    for part in text.split(",") if text else ():
        name, equals, column = (piece.strip() for piece in part.partition("="))
        if not (name and equals and column):
            raise ConfigError(
                f"--columns {text}: {part!r} is not NAME=COLUMN", "write --columns prompt=text,answer=label"
            )
        found[name] = column
    return found
