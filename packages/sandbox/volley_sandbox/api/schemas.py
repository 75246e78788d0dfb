"""Wire schemas of the requests to this package's routes, from which the OpenAPI page is made."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, Field, Json, JsonValue

from services.env.api.schemas import Body, Name, example
from shared.bounds import MAX_URL, check_json

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
EntryName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?$")]
Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
MAX_CONFIG, MAX_CONFIG_VALUES = 16 * 1024, 256
"""Limits of `config`, in bytes as JSON and in values; settings are stored and shown with every version."""


def _check_config(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    data = json.dumps(config).encode()
    if len(data) > MAX_CONFIG:
        raise ValueError(f"config has {len(data)} bytes as JSON; the limit is {MAX_CONFIG}")
    check_json(data, "config", MAX_CONFIG_VALUES)
    return config


Config = Annotated[dict[str, JsonValue], AfterValidator(_check_config)]


class SubmitQuery(Body, json_schema_extra=example(name="adder", weight=1.0)):
    """Query of a file submission.

    `entry` names the class if the file has several; `config`, as JSON text, holds the arguments of the class or the
    settings of task folders; `weight` is the share in live runs, relative to 1 for the run's own environment, and 0
    joins none.
    """

    name: EnvName
    entry: EntryName | None = None
    config: Annotated[Json[dict[str, JsonValue]], AfterValidator(_check_config)] = {}
    weight: Weight = 0.0


class SubmitBody(
    Body,
    json_schema_extra=example(name="adder", source='class Adder:\n    splits = {"train": 10}\n    ...', weight=1.0),
):
    """One Python file as text; `config` holds the arguments of its class."""

    name: EnvName
    source: Annotated[str, Field(min_length=1)]
    entry: EntryName | None = None
    config: Config = {}
    weight: Weight = 0.0


class ReplaceBody(Body, json_schema_extra=example(source='class Adder:\n    splits = {"train": 10}\n    ...')):
    """The next version of the environment in the path."""

    source: Annotated[str, Field(min_length=1)]
    entry: EntryName | None = None
    config: Config = {}
    weight: Weight = 0.0


class RemoteBody(
    Body,
    json_schema_extra=example(
        name="echo", url="http://127.0.0.1:8000", protocol="openenv", config={"action_field": "message"}, weight=1.0
    ),
):
    """An environment on another server; `config` holds the settings of the protocol.

    `tasks` are JSON lines by split, for servers without tasks of their own (nemo_gym).
    """

    name: EnvName
    url: Annotated[str, Field(min_length=1, max_length=MAX_URL)]
    protocol: Annotated[str, Field(min_length=1, max_length=80)]
    tasks: dict[str, str] = {}
    config: Config = {}
    weight: Weight = 0.0


class AdapterBody(Body, json_schema_extra=example(name="tac", adapter="textarena", config={"game": "TicTacToe-v0"})):
    """An environment of another package, played by the named adapter; `config` holds the adapter's settings."""

    name: EnvName
    adapter: Annotated[str, Field(min_length=1, max_length=80)]
    config: Config = {}
    weight: Weight = 0.0


class InstalledBody(
    Body, json_schema_extra=example(name="maze", import_path="my_package.envs:Maze", config={"size": 7})
):
    """An environment of an installed package, which declares it as an entry point.

    `config` holds the arguments of its class.
    """

    name: EnvName
    import_path: Annotated[str, Field(min_length=1, max_length=300)]
    config: Config = {}
    weight: Weight = 0.0


class RegisterBody(Body, json_schema_extra=example(name="frozen_lake-6", base="frozen_lake", config={"size": 6})):
    """A configured variant of the environment `base`."""

    name: EnvName
    base: Name
    config: Config = {}
    weight: Weight = 0.0


class ToolsQuery(Body, json_schema_extra=example(env="gsm8k")):
    """`env` is an environment that has tools; by default, the tools that any environment can have."""

    env: Name | None = None


class CallBody(Body, json_schema_extra=example(arguments={"expression": "48/2"})):
    """`seed` drives everything random in the tool."""

    arguments: dict[str, JsonValue]
    env: Name | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
