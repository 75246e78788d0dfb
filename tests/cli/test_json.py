"""Every command with `--json`: standard output is one JSON value, on success and on failure.

The commands are those of the parser: a new one without a case here fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from shared.errors import Unavailable
from shared.run.folder import RunFolder
from tests.fuzz.driver import in_a_thread
from tests.fuzz.stack import open_stack, run_config
from tests.support import small_run
from tools.embedded_redis import embedded_server
from volley.__main__ import main, parser, subcommands
from volley.layout import PROJECT
from volley.printing import print_lines, print_result, use_json
from volley.program import run_program
from volley.runs import addresses

TEMPLATE = PROJECT / "packages/sandbox/volley_sandbox/submissions/templates/sums.py"


class Case(NamedTuple):
    """Arguments that succeed, with `{run}` and `{tmp}` for folders; some keys of the result; the code, None for any."""

    arguments: str
    keys: Sequence[str] = ()
    code: int | None = 0


def leaves(names: Sequence[str] = ()) -> Iterator[str]:
    """Names of all commands, with those of their own commands."""
    part = parser()
    for name in names:
        part = subcommands(part)[name]
    inner = subcommands(part)
    if not inner:
        yield " ".join(names)
    for name in inner:
        yield from leaves([*names, name])


LEAVES = [*leaves()]
SUCCESS: Mapping[str, Case] = {
    "train": Case("{run}", ["steps", "evaluations"]),
    "up": Case("{run}", ["steps"]),
    "follow": Case("--config {run}/config.yaml", ["steps"]),
    "status": Case("{run}", ["state", "services"]),
    "report": Case("{run}", ["steps", "tickets"]),
    "trajectories": Case("{run}", ["total", "rows", "damaged"]),
    "compare": Case("{run} {run} --plot {tmp}/plot.png"),
    "track": Case("{run} --to tensorboard", ["reported", "failed"], code=None),
    "verify": Case("{run}", ["ok", "violations"]),
    "env init": Case("{tmp}/new.py", ["file"]),
    "env test": Case("{tmp}/sums.py", ["checks"]),
    "env submit": Case("{tmp}/s1.py --run {run}", ["name", "state"]),
    "env list": Case("--run {run}", ["environments"]),
    "env show": Case("s1 --run {run}", ["versions"]),
    "env logs": Case("s1 --run {run}", ["log"]),
    "env retire": Case("s1 --run {run}", ["state"]),
    "env activate": Case("s1@1 --run {run}", ["state"]),
    "doctor": Case("", code=None),
    "plan": Case("--config configs/quickstart.yaml", ["fits", "topology", "trainer", "rollout", "disk", "refusals"]),
    "launch slurm": Case("--config configs/quickstart.yaml run.dir={tmp}/runs --out {tmp}/slurm", ["script", "hosts"]),
    "launch sky": Case("--config configs/quickstart.yaml run.bucket=s3://b/r --out {tmp}/sky", ["script", "hosts"]),
    "launch tpu-vm": Case(
        "--config configs/quickstart.yaml rollout.engine.device=tpu run.dir={tmp}/runs --out {tmp}/tpu"
        " --zone=us-central2-b --trainer-type=v4-8",
        ["script", "hosts"],
    ),
    "config show": Case("--config {run}/config.yaml"),
    "config schema": Case("", ["properties"]),
    "completion": Case("fish", ["shell", "script"]),
    "upgrade": Case("", ["version", "command"]),
    "access": Case("{run}", ["services", "variables"]),
}
"""In this order: the later of `env` need the earlier."""

ELSEWHERE = {
    *("quickstart", "sft", "dpo", "tinker", "dashboard", "eval", "replay", "reverify"),
    *("fork", "model get", "serve", "export", "node"),
}
"""Commands that train, serve or download: tests/system/test_json.py runs them, but for the download and one host of
several, which tests/deploy/test_launched_runs.py runs.
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A finished run whose services answer, and a folder with environments."""
    folder = tmp_path_factory.mktemp("json")
    run = RunFolder(small_run.make(folder / small_run.RUN))
    for name in ("sums.py", "s1.py"):
        (folder / name).write_bytes(TEMPLATE.read_bytes())
    (folder / "stack").mkdir()
    with embedded_server(folder / "redis") as redis:
        settings = run_config(folder / "stack", redis.url)
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": small_run.RUN})})
        with in_a_thread(lambda: open_stack(settings)) as urls:
            named = {("rollout-0" if name == "rollout" else name): url for name, url in urls.items()}
            addresses.write(run, named, {}, settings.services)
            yield {"run": run.path, "tmp": folder}


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Return the exit code, the value on standard output, and standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, orjson.loads(shown.out), shown.err


def test_every_command_has_a_case() -> None:
    assert {*SUCCESS} | ELSEWHERE == {*LEAVES}


@pytest.mark.parametrize("name", SUCCESS)
def test_the_result_is_json(name: str, places: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    case = SUCCESS[name]
    code, value, _ = called(capsys, *name.split(), *case.arguments.format(**places).split())
    assert case.code in (code, None), value
    assert value
    assert "error" not in value
    for key in case.keys:
        assert key in value


@pytest.mark.parametrize("name", LEAVES)
def test_wrong_usage_is_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, value, errors = called(capsys, *name.split(), "--no-such-option", "x")
    assert (code, value["exit_code"], value["error"]["type"]) == (2, 2, "urn:volley:ConfigError")
    assert value["error"]["detail"] in errors


@pytest.mark.parametrize("name", ["report", "verify", "replay --from-step 1", "reverify", "track", "trajectories"])
def test_a_wrong_folder_is_json(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *more = name.split()
    code, value, _ = called(capsys, command, str(tmp_path), *more)
    assert (code, value["exit_code"]) == (2, 2)
    assert value["error"]["detail"]


def test_a_command_without_a_result_gives_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        use_json(True)
        print_lines("about to fail")
        return 3

    with pytest.raises(SystemExit):
        run_program(command)
    shown = capsys.readouterr()
    assert (orjson.loads(shown.out), shown.err) == ({"exit_code": 3}, "about to fail\n")


def test_an_error_after_the_result_adds_nothing_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        use_json(True)
        print_result({"url": "here"})
        raise Unavailable("gone")

    with pytest.raises(SystemExit) as ended:
        run_program(command)
    shown = capsys.readouterr()
    assert (ended.value.code, orjson.loads(shown.out), shown.err) == (1, {"url": "here"}, "volley: gone\n")
