"""Arguments of `volley train`, `volley plan` and `volley config show` for a run on own data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.config import LoadedConfig
from shared.errors import ConfigError


class DataArguments:
    """The options, and the configuration that they make."""

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("on your own data", "volley train MODEL --data FILE --reward FILE.py")
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
        """Make the configuration, if --data is given. Args: given: the model and the overrides.

        Raises ConfigError.
        """
        if arguments.data is None:
            alone = [
                name for name in ("reward", "tools", "columns", "eval_data", "eval_share") if _is_given(arguments, name)
            ]
            if alone:
                raise ConfigError(f"--{alone[0].replace('_', '-')} goes with --data", "add --data FILE")
            return None
        models = [one for one in given if not _is_override(one)]
        overrides = [one for one in given if _is_override(one)]
        path = [one.partition("=")[2] for one in overrides if one.startswith("model.path=")]
        if len(models) + len(path[-1:]) != 1:
            told = f"{len(models)} models are named: {', '.join(models)}" if models else "no model is named"
            raise ConfigError(told, "write volley train MODEL --data FILE --reward FILE.py")
        from volley_data.configure import configure

        return configure(
            (models or path)[-1],
            arguments.data,
            arguments.reward,
            tools=arguments.tools,
            columns=_columns(arguments.columns),
            eval_data=arguments.eval_data,
            eval_share=arguments.eval_share,
            config=arguments.config or (),
            overrides=overrides,
        )


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
