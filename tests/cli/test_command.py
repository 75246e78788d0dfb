"""The command as a user calls it: each mistake is one line that names the thing, and an exit code."""

from __future__ import annotations

import ast
import dataclasses
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.boot import bind
from shared.config import load
from shared.errors import ConfigError
from shared.models.hub import model_folder
from shared.process.ports import free_port
from shared.services_schema import Endpoint, ServicesSection
from volley.__main__ import _example, all_commands, main, parse_arguments
from volley.commands import train
from volley.layout import PROJECT
from volley.local import ports
from volley.runs import record as runs
from volley_convert import command as export

CONFIG = "configs/quickstart.yaml"


def volley(*arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "volley", *arguments]
    env = {**os.environ, **(variables or {})}
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, encoding="utf-8", timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--config", CONFIG, "trainer.max_stepz=3"], "unknown key trainer.max_stepz"),
        (["train", "--config", CONFIG, "trainer.max_steps"], "key.path=value"),
        (["train", "--config", CONFIG, "data.train=/missing/train.jsonl"], "data.train=/missing/train.jsonl"),
        (["train", "--config", CONFIG, "model.path=./missing"], "model.path missing"),
        (["train", "--config", CONFIG, "data.train=/dev/zero"], "data.train=/dev/zero: is a device, not a file"),
        (["train", "--config", CONFIG, "data.mixture.sokobann=1"], "data.mixture=sokobann: there is no such"),
        (["tinker", "configs/models/quickstart", "--device", "tpu"], "--device tpu: no TPU was found on this machine"),
        (["up", "trainer.max_steps=3"], "neither a run's folder nor --config"),
        (["up", "/missing"], "/missing: no such folder"),
        (["up", "configs"], "its run.json is missing"),
        (["up", "--config", CONFIG, "configs"], "key.path=value"),
        (["verify", "/missing"], "/missing"),
        (["replay", "/missing", "--from-step", "1"], "/missing"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert_one_line(shown.err, named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["env", "tset", "a.py"], "'tset' is unknown: did you mean test?"),
        (["serve", "x", "--device", "gpuu"], "did you mean gpu?"),
        (["train", "--config", CONFIG, "--trainer.lr", "5"], "settings have no dashes, write trainer.lr=VALUE"),
    ],
)
def test_wrong_usage_names_what_was_meant(arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert named in capfd.readouterr().err


def test_settings_may_have_dashes() -> None:
    given = ["train", "--config", CONFIG, "--trainer.max_steps=5", "run.name=a", "--run.seed=1", "--config=b.yaml"]
    arguments = parse_arguments(given)
    assert arguments.config == [CONFIG, "b.yaml"]
    assert arguments.rest == ["trainer.max_steps=5", "run.name=a", "run.seed=1"]


def test_an_older_python_is_told_of_in_one_line(tmp_path: Path) -> None:
    """Every file that runs before the sentence can be read by the oldest Python that people have."""
    source = (PROJECT / "volley/__init__.py").read_text(encoding="utf-8")
    before = source[: source.index("import services")]
    ast.parse(before, feature_version=(3, 8))
    older = before.replace("import sys", "import sys; sys.version_info = (3, 10)")
    done = subprocess.run([sys.executable, "-c", older], capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("volley: Python 3.12 or 3.13 is needed")


def test_a_mistake_is_one_line_of_the_process_too() -> None:
    done = volley("train", "--config", CONFIG, "trainer.max_stepz=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "unknown key trainer.max_stepz")


def assert_one_line(text: str, named: str) -> None:
    first, *hint = text.splitlines()
    assert len(hint) <= 1
    assert all(one.startswith("  ") for one in hint)
    assert first.startswith("volley: ")
    assert named in text.replace(f"{PROJECT}/", "")


def test_a_runs_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"is the folder of a run, not of a model \(.*{tmp_path}@latest"):
        model_folder(str(tmp_path))


def test_export_takes_a_version_as_other_commands_do(tmp_path: Path) -> None:
    assert export.named(tmp_path, None) == (tmp_path, "latest")
    for run, version in ((tmp_path, "e000001-s000002"), (Path(f"{tmp_path}@e000001-s000002"), None)):
        assert export.named(run, version) == (tmp_path, "e000001-s000002")
    with pytest.raises(ConfigError, match="name two versions"):
        export.named(Path(f"{tmp_path}@e000001-s000002"), "e000001-s000001")


def test_help_lists_the_commands_and_imports_none_of_them() -> None:
    heavy = "{'aiohttp', 'numpy', 'pydantic'} & set(sys.modules)"
    code = f"import sys; from volley.__main__ import parser; parser('').print_help(); sys.exit({heavy} and 1 or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, encoding="utf-8", check=True)
    assert all(f"\n  {name} " in done.stdout for name in all_commands())
    assert all(example_of(name) in done.stdout for name in all_commands())


@pytest.mark.parametrize("name", all_commands())
def test_each_example_of_the_help_is_accepted(name: str) -> None:
    words = shlex.split(example_of(name).partition("$(")[2].rstrip(')"') or example_of(name))
    parsed = parse_arguments(words[1:])
    assert parsed.called == name


def example_of(name: str) -> str:
    return _example(all_commands()[name])


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: volley {name} [-h] ")


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, said.out, said.err


def test_going_on_with_a_finished_run_shows_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run: {{name: r, dir: {tmp_path}}}\nmodel: {{path: configs/models/tiny}}\ndata: {{env: e}}\n", encoding="utf-8"
    )
    with runs.claimed(load([config])) as (folder, record, _):
        runs.write_record(folder, dataclasses.replace(record, finished=True))
        folder.metrics.write_text('{"step": 1, "time": 5.0, "version": "e000001-s000001"}\n', encoding="utf-8")
    code, shown, errors = ended(capsys, "up", str(folder.path))
    assert code == 0, errors
    assert shown.startswith(
        f"run r is finished; `volley up {folder.path} trainer.max_steps=N`, N above 10, continues it\n"
    )
    assert "e000001-s000001" in shown
    _, status, _ = ended(capsys, "status", str(folder.path))
    assert status.startswith(f"run r is finished\n`volley report {folder.path}` shows its results")
    code, _, errors = ended(capsys, "up", str(folder.path), "trainer.groups_per_step=11")
    assert code == 2
    assert "groups_per_step (was 8, now 11) may not change" in errors


def test_an_output_that_has_not_all_signs_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0}\n', encoding="utf-8")
    done = volley("report", str(tmp_path), variables={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "mean |? log p|" in done.stdout


def test_status_of_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = ended(capsys, "status", "http://127.0.0.1:1")
    assert code == 1
    assert "not ready" in shown


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        services = ServicesSection.model_validate({"env": {"port": port}})
        with pytest.raises(ConfigError, match=rf"services\.env\.port={port}"):
            ports.choose(services, {"env": {"port": port}}, {"env": 1})


def test_a_new_run_with_a_taken_port_leaves_no_folder(tmp_path: Path) -> None:
    quickstart = str(PROJECT / "configs/quickstart.yaml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"services\.env\.port={port}: 127.0.0.1:{port} cannot be used"):
            train.main([quickstart], [f"run.dir={tmp_path}", f"services.env.port={port}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "problem"), [("nope.invalid", "cannot be resolved"), ("192.0.2.1", "not an address of this machine")]
)
def test_a_host_that_is_not_ours_is_told_from_a_taken_port(host: str, problem: str) -> None:
    for given in ({"host": host}, {"host": host, "port": 8101}):
        services = ServicesSection.model_validate({"env": given})
        with pytest.raises(ConfigError, match=rf"services\.env\.host={host}: .*{problem} \(name an address"):
            ports.choose(services, {"env": given}, {"env": 1})
    with pytest.raises(ConfigError, match=rf"{host}:8101: .*{problem} \(name an address"):
        bind(Endpoint(host=host, port=8101))


def test_free_ports_are_distinct_and_named_ones_are_kept() -> None:
    free = free_port()
    services = ServicesSection.model_validate({"trainer": {"port": free}})
    chosen = ports.choose(
        services, {"trainer": {"port": free}}, {"env": 1, "rollout": 3, "orchestrator": 1, "trainer": 1}
    )
    numbers = [port for found in chosen.values() for port in found]
    assert chosen["trainer"] == [free]
    assert len(chosen["rollout"]) == 3
    assert len(set(numbers)) == len(numbers) == 6
    assert ports.urls(services, chosen)["rollout-2"] == f"http://127.0.0.1:{chosen['rollout'][2]}"
