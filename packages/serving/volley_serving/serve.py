"""`volley serve`: serve a model by HTTP, without Redis and without a trainer, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import re
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from shared import boot, config, packages
from shared.clients.base import HttpClient
from shared.config import LoadedConfig
from shared.errors import ConfigError, VolleyError, first_error
from shared.models import hub, origin
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.weight_files import KEY as RANDOM
from shared.models.weight_files import weight_files
from shared.process.ports import hold, hold_free, host_problem
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services import SERVICES
from shared.services_schema import Endpoint
from shared.visible import quoted
from shared.web.access import MIN_TOKEN
from volley.layout import python_of, variables_of
from volley.local.processes import ProcessSpec, Reaper
from volley.local.signals import Stopped, stopping_on_signal
from volley.local.supervisor import SupervisedProcess, keep_running
from volley.printing import print_lines as say
from volley.printing import print_result
from volley.run_arguments import add_api_key, add_trust, api_key_of
from volley.runs.record import secret
from volley_launch.accelerators import check_device
from volley_launch.scratch import scratch_folder

_NAME, _MODULE = "serve", "volley_serving.standalone"
LONGEST_CONTEXT = 8192
"""Default limit of the context, in tokens, for models that were trained on longer ones."""
_NO_WEIGHTS = "name a folder with weights as safetensors; `volley model get HUB_ID` downloads one"
_CONTEXT = "rollout.engine.context_length"
_STOP_MARGIN_S = 5.0
_BACKLOG = 128
_INFO = SERVICES["rollout"]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the command line; None is the default. `api_key` is empty to require no token."""

    host: str = "127.0.0.1"
    port: int | None = None
    dtype: str | None = None
    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    context_length: int | None = None
    weights_root: Path | None = None
    api_key: str | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The configuration to serve, its temporary folder, the model's folder, and the token of clients, if any."""

    loaded: LoadedConfig
    folder: RunFolder
    model: Path
    name: str
    token: str | None

    @property
    def url(self) -> str:
        return self.loaded.config.services.base_url("rollout")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODEL",
        help="a Hugging Face folder, a hub id like Qwen/Qwen3-0.6B, RUN (its newest checkpoint) or RUN@VERSION",
    )
    add_server(parser, _INFO.port)
    parser.add_argument(
        "--weights-root", type=Path, metavar="FOLDER", help="allow /update_weights_from_disk to load folders below it"
    )
    access = parser.add_mutually_exclusive_group()
    add_api_key(access, "token that clients send (default: a random one)")
    access.add_argument("--no-token", action="store_true", help="answer every caller, for clients that send no token")
    add_trust(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="further settings, e.g. of rollout.engine"
    )


def add_server(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the arguments of every command that serves a model; `port` is the usual one."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help=f"default: {port}, or a free one if that is taken")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--device", choices=("cpu", "tpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help=f"prompt and answer together (default: the model's, at most {LONGEST_CONTEXT})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    options = ServeOptions(
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        device=arguments.device,
        context_length=arguments.context_length,
        weights_root=arguments.weights_root,
        api_key="" if arguments.no_token else api_key_of(arguments),
        overrides=arguments.overrides,
    )
    return main(arguments.target, options)


def main(target: str, options: ServeOptions) -> int:
    """Serve the model until a signal. Returns the exit code. Raises VolleyError if it cannot start or ends early."""
    python_of(_INFO.environment)
    with scratch_folder("volley-serve-") as temporary:
        served = prepare(target, options, temporary)
        with listening(served.loaded.config.services.rollout) as listener:
            return until_stopped(_serve(served, listener))


def until_stopped(serving: Coroutine[Any, Any, None]) -> int:
    """Run until a signal; return the exit code, 0 after Ctrl-C. Raises VolleyError."""
    try:
        asyncio.run(serving)
    except Stopped as stopped:
        say(f"stopped by {stopped}")
        return 0 if stopped.exit_code == 130 else stopped.exit_code
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return 0


def prepare(target: str, options: ServeOptions, temporary: Path) -> ServedModel:
    """Check device, model and address, and write the service's files below `temporary`. Raises ConfigError."""
    folder = RunFolder(temporary / _NAME)
    folder.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    if options.weights_root is not None and not options.weights_root.is_dir():
        raise ConfigError(f"--weights-root {options.weights_root} is no folder", "create it first")
    if options.device != "cpu":
        check_device(options.device, [_INFO.environment], "--device")
    path, port = _model_path(target), find_port(options.host, options.port, _INFO.port)
    token_files, token = _tokens(options, folder)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    tree = {
        "run": {"name": _NAME, "dir": str(temporary), "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
        "model": {"path": path, "dtype": dtype},
        "data": {"env": "none"},
        "trainer": {"length_buckets": [2**30]},  # there is none to limit the context
        "rollout": {
            "engine": {"device": options.device},
            "weights_root": options.weights_root and str(options.weights_root),
        },
        "services": {"rollout": {"host": options.host, "port": port}, "token_files": token_files},
    }
    loaded = config.rooted(config.load([], options.overrides, given=tree), Path.cwd())
    try:
        found = hub.keep(loaded.config)
        model = hub.model_folder(loaded.config.model.path, folder.path, weights=True)
        if found is None:
            weight_files(model)
    except ConfigError as error:
        raise without_key(error) from error
    loaded = with_context(loaded, model, options.context_length, options.overrides)
    folder.config.write_text(yaml.safe_dump(loaded.tree), encoding="utf-8")
    return ServedModel(loaded, folder, model, found.path if found else target, token)


def with_context(loaded: LoadedConfig, model: Path, asked: int | None, overrides: Sequence[str]) -> LoadedConfig:
    """Set the context, unless an override does: what is asked for, or the model's up to LONGEST_CONTEXT."""
    if any(one.startswith(f"{_CONTEXT}=") for one in overrides):
        return loaded
    longest = ModelConfig.read(model).max_position_embeddings
    return config.changed(loaded, {_CONTEXT: min(longest, LONGEST_CONTEXT) if asked is None else asked})


def _model_path(target: str) -> str:
    """Write MODEL as `model.path`: RUN is RUN@latest. Raises ConfigError for a run's folder of somebody else."""
    run = RunFolder(
        Path(target.rpartition("@")[0] if "@" in target and not Path(target).is_dir() else target).absolute()
    )
    if not run.record.exists() or (run.path / "config.json").exists():
        return target
    trust.check(run)
    return f"{run.path}@{origin.LATEST}" if Path(target).is_dir() else target


def without_key(error: ConfigError) -> ConfigError:
    """Name the model as on the command line, where there is no key `model.path`, and no random weights."""
    hint = _NO_WEIGHTS if error.hint and RANDOM in error.hint else error.hint
    return ConfigError(re.sub(r"^model\.path[ =]", "", error.detail), hint)


def find_port(host: str, port: int | None, usual: int) -> int:
    """Check the port, or find a free one, if possible the `usual` one. Raises ConfigError."""
    try:
        listener = hold_free(host, usual) if port is None else hold(host, port)
    except (OSError, OverflowError) as error:
        if (problem := host_problem(error)) is not None:
            raise ConfigError(f"--host {host}: {problem}", "name an address of this machine") from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {port}: {host}:{port} cannot be used ({reason})",
            "another program may use it; name another port, or leave --port out to get a free one",
        ) from error
    with listener:
        return int(listener.getsockname()[1])


def _tokens(options: ServeOptions, folder: RunFolder) -> tuple[dict[str, str], str | None]:
    """Write the token files; the token of clients has every role. Raises ConfigError."""
    key = options.api_key
    if key == "":
        return {}, None
    if key is not None and (len(key) < MIN_TOKEN or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(
            f"the API key must have {MIN_TOKEN} or more ASCII characters, without blanks",
            "leave it out for a random one, or say --no-token",
        )
    files = {"admin": secret(folder, "token_admin", key), "service": secret(folder, "token_service")}
    return {role: str(path) for role, path in files.items()}, files["admin"].read_text(encoding="utf-8").strip()


def listening(endpoint: Endpoint) -> socket.socket:
    """Listen for a service that has not started yet, so that no other program takes its port.

    Raises ConfigError, Unavailable.
    """
    listener = boot.bind(endpoint)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{endpoint.host}:{endpoint.port} cannot be used ({error.strerror})", "another program took it; try again"
        ) from error
    return listener


async def _serve(served: ServedModel, listener: socket.socket) -> None:
    """Run the service until a signal. Raises Stopped, VolleyError, or a group of them."""
    engine, url, log = served.loaded.config.rollout.engine, served.url, served.folder.logs / "rollout.log"
    limits = served.loaded.config.services.limits
    spec = ProcessSpec(
        _INFO.name,
        (
            str(python_of(_INFO.environment)),
            "-P",
            "-m",
            _MODULE,
            "--config",
            str(served.folder.config),
            "--listener",
            str(listener.fileno()),
        ),
        variables_of(_INFO.environment, cpu=engine.device == "cpu"),
        log,
        limits.grace_s + boot.CLEANUP_S + _STOP_MARGIN_S,
        inherits=(listener.fileno(),),
    )
    began = time.monotonic()
    say(f"loading {served.name} (log: {log})")
    with Reaper.running() as reaper:
        async with (
            stopping_on_signal(lambda name: say(f"{name}: stopping (once more: without waiting)"), reaper.kill_all),
            keep_running([SupervisedProcess(spec, lambda: is_ready(url), _INFO.start_s)], reaper, say),
        ):
            described = {"url": served.url, "model": served.name, "token": served.token, "log": log}
            print_result(described, "\n".join(ready_lines(served, time.monotonic() - began)))
            await asyncio.Event().wait()


async def is_ready(url: str) -> bool:
    """Return whether requests may be routed to the service."""
    async with HttpClient(url, timeout_s=2.0) as client:
        try:
            await client.get("/ready", attempts=1)
        except VolleyError:
            return False
        return True


def ready_lines(served: ServedModel, after_s: float) -> list[str]:
    """Lines that say how to reach the server, with a request to copy."""
    engine, model = served.loaded.config.rollout.engine, served.loaded.config.model
    header = f" -H {quoted(f'Authorization: Bearer {served.token}')}" if served.token else ""
    path, body = _example(served.model)
    lines = [
        f"ready after {after_s:.0f} s: {served.name} at {served.url}"
        f" ({model.dtype} on {engine.device}, {engine.context_length} tokens of context)",
        f"token: {served.token}" if served.token else "no token: every caller has full access",
        "",
        f'curl {quoted(served.url + path)}{header} -H "Content-Type: application/json" -d {quoted(json.dumps(body))}',
        "",
        f"all routes: {served.url}/docs    stop: Ctrl-C",
    ]
    if _has_openai():
        key = served.token or "none"
        lines.insert(-1, f"OpenAI clients: OPENAI_BASE_URL={served.url}/v1 OPENAI_API_KEY={key}")
    if served.token is None and served.loaded.config.services.rollout.host not in boot.LOOPBACK:
        lines.append("warning: other machines can reach this address, and no token is required")
    return lines


def _example(model: Path) -> tuple[str, dict[str, object]]:
    """Path and body of a request that the server and the model's tokenizer allow."""
    if not (model / "tokenizer.json").is_file():
        return "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 16}}
    if not (_has_openai() and _has_template(model)):
        return "/generate", {"text": "2 + 2 =", "sampling_params": {"max_new_tokens": 16}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 32}


def _has_template(model: Path) -> bool:
    try:
        ChatTokenizer(model)
    except ConfigError:
        return False
    return True


def _has_openai() -> bool:
    """Return whether a package adds OpenAI's routes to the server."""
    return "rollout.openai" in packages.found(packages.ROUTERS)
