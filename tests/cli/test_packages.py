"""A package that is installed adds a section, a command and a proof; one that is not is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from services.env.app import open_extension
from services.env.settings import ConfiguredSource, from_config
from services.env.threads import ThreadRunner
from services.orchestrator.settings import from_config as orchestrator_settings
from services.trainer.app import open_service as open_trainer_process
from shared import packages
from shared.config import load
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.run.sources import FoundSource
from shared.run_config import extended
from shared.schema import RunConfig, TrainerSection
from shared.section import PackageSection
from tests.support import small_run
from volley import Client
from volley.__main__ import parse_arguments
from volley.commands import train
from volley.layout import PROJECT
from volley.reports import reports
from volley.runs.run_file import read_record

MODULE = """
from contextlib import contextmanager
from typing import Literal

from fastapi import APIRouter

from services.env.extension import Extension

from shared.algorithm_base import GroupSection
from shared.algorithm_kinds import AlgorithmKind
from shared.backend_kinds import BackendKind
from shared.engine_kinds import EngineKind
from shared.run_config import value_of
from shared.section import PackageKey, PackageSection
from shared.web.access import Role
from shared.web.routes import ServiceRoutes
from volley.command import Command
from volley.printing import print_result
from volley.proof import Proof

COMMAND = Command("fictitious", "say a word", "word", group="Look")
BACKEND = BackendKind("fictitious:Learner", 1, lambda config: "it has no words" if config.trainer.lora else None)
ENGINE = EngineKind("fictitious:open_engine", ("exact_ids",), is_external=True)
SHOUT = PackageKey(bool, False, "With `shout`, the word is loud.")

router = APIRouter()
ROUTES = ServiceRoutes(router, {"GET /word": Role.ANYONE})

@router.get("/word")
async def word():
    return {"word": "hello"}

class LineSink:
    name = "word"

    def __init__(self, folder):
        self._file = folder / "lines"

    def write(self, kind, line):
        self._file.write_text(f"{kind} {line['step']}")

    def close(self):
        pass

class WordSection(PackageSection):
    "A word."
    word: str = "hello"

class HumSection(GroupSection):
    "A tune."
    name: Literal["hum"]
    volume: int = 7

ALGORITHM = AlgorithmKind(HumSection, "fictitious:Hum")

@contextmanager
def say(folder, config):
    print("HELLO" if value_of(config, SHOUT) else "hello")
    yield
    print("bye")

def add(parser):
    parser.add_argument("--loud", action="store_true")

def run(arguments):
    print_result({"loud": arguments.loud}, "HELLO" if arguments.loud else "hello")
    return 0

class WordExtension(Extension):
    def about(self):
        return {"word": "hello"}

    def rows(self):
        return [{"name": "word", "base": "word", "config": {}, "state": "active", "version": 1, "weight": 0.0}]

def prove(folder, tell):
    return Proof({"ok": True}, "proven: a word") if (folder / "word").exists() else None
"""
POINTS = """
[volley.commands]
word = fictitious:COMMAND
[volley.sections]
trainer.word = fictitious:WordSection
[volley.keys]
run.shout = fictitious:SHOUT
[volley.sidecars]
word = fictitious:say
[volley.routers]
orchestrator.word = fictitious:ROUTES
[volley.sinks]
word = fictitious:LineSink
[volley.proofs]
word = fictitious:prove
[volley.engines]
parrot = fictitious:ENGINE
[volley.backends]
lute = fictitious:BACKEND
[volley.algorithms]
hum = fictitious:ALGORITHM
"""
SERVE = """
import asyncio, sys
from pathlib import Path
import httpx
from shared.process.sinks import MetricsFanout
from shared.services_schema import Limits
from shared.web.http import create_app

async def answer(service):
    app = create_app(service, limits=Limits(), tokens=None, ready=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return (await client.get("/word")).status_code

print(asyncio.run(answer("orchestrator")), asyncio.run(answer("env")))
with MetricsFanout.opened([], Path(sys.argv[1])) as sinks:
    sinks.send("step", {"step": 7})
"""
ALONE = """
import importlib.metadata
importlib.metadata.entry_points = lambda **group: ()

import services.orchestrator.app, services.env.app
from services.env.environments.kinds import kinds
from shared import backend_kinds, engine_kinds
from shared.config import load
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from volley.__main__ import all_commands

load(["configs/chaos.yaml"])
print(*kinds())
print(engine_kinds.names(), backend_kinds.names())
print("verify" in all_commands())
for path, setting in (("quickstart", "mode=rl"), ("chaos", "mode=sft"), ("chaos", "algorithm.name=dppo")):
    try:
        load([f"configs/{path}.yaml"], [setting])
    except ConfigError as error:
        print(error.detail)
try:
    ModelConfig.parse({"model_type": "gemma2"})
except ConfigError as error:
    print(error.detail)
"""
PLAY = """
import asyncio, sys
import importlib.metadata
from pathlib import Path
import httpx

points = [importlib.metadata.EntryPoint(*one.split("="), "volley.parts") for one in sys.argv[2:]]
importlib.metadata.entry_points = lambda **group: () if group else points

from services.env.app import open_env
from services.env.settings import from_config
from shared.config import validate

async def play(client):
    body = {"request_id": "1", "env": "frozen_lake", "split": "train", "index": 0}
    episode = (await client.post("/episodes", json=body)).json()
    message = {"role": "assistant", "content": "<answer>Right</answer>"}
    path = f"/episodes/{episode['episode_id']}/step"
    step = await client.post(path, json={"request_id": "2", "message": message})
    rows = (await client.get("/environments")).json()["environments"]
    submitted = await client.post("/environments", json={"name": "a", "source": "b"})
    print(step.status_code, submitted.status_code, *(row["name"] for row in rows))
    print((await client.get("/health")).json())

async def main():
    tree = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}, "services": {"env": {"folder": sys.argv[1]}}}
    settings = from_config(validate(tree).config)
    async with open_env(settings) as service:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://x") as client:
            await play(client)

asyncio.run(main())
"""
COMMANDS = """
import contextlib, io, json, sys
from volley.__main__ import main

ended = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main(command)
        except SystemExit as end:
            ended.append((end.code, out.getvalue(), errors.getvalue()))
print(json.dumps(ended))
"""
SETTINGS = ("config", "show", "--config", "configs/quickstart.yaml")


class Ended(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed distribution of one module."""
    about = tmp_path / "site" / "fictitious-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fictitious\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    (about.parent / "fictitious.py").write_text(MODULE, encoding="utf-8")
    return about.parent


def volley(site: Path, *arguments: str) -> Ended:
    return volleys(site, arguments)[0]


def volleys(site: Path, *commands: Sequence[str]) -> list[Ended]:
    """What each command exits with and prints, one after the other in one process: each start takes a second."""
    done = python(site, "-c", COMMANDS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [Ended(*one) for one in json.loads(done.stdout)]


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, encoding="utf-8", check=False)


def test_its_command_is_listed_and_runs(site: Path) -> None:
    listed, loud, as_json = volleys(site, ["--help"], ["word", "--loud"], ["word", "--json"])
    look = listed.stdout.partition("Look:")[2].partition("\n\n")[0]
    assert "\n  word          say a word\n" in look
    assert loud.stdout == "HELLO\n"
    assert as_json.stdout.split() == ["{", '"loud":', "false", "}"]


def test_its_section_has_defaults_a_schema_and_checked_keys(site: Path) -> None:
    given = [*SETTINGS, "trainer.word.word=bye"], ["config", "schema"], [*SETTINGS, "trainer.word.wrod=bye"]
    shown, schema, wrong = volleys(site, *given)
    assert "trainer.word.word" in shown.stdout
    assert "bye" in shown.stdout
    assert '"WordSection"' in schema.stdout
    assert wrong.returncode == 2
    assert "unknown key trainer.word.wrod: did you mean trainer.word.word?" in wrong.stderr


def test_its_route_is_of_one_service_and_its_sink_gets_lines(site: Path, tmp_path: Path) -> None:
    assert python(site, "-c", SERVE, str(tmp_path)).stdout == "200 404\n"
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "step 7"


def test_its_engine_is_a_kind_of_the_configuration(site: Path) -> None:
    engine = ("rollout.engine.kind=parrot", "rollout.engine.url=http://127.0.0.1:1")
    taken, refused = volleys(site, [*SETTINGS, *engine], [*SETTINGS, "rollout.engine.kind=parot"])
    assert "parrot" in taken.stdout
    assert refused.returncode == 2
    assert "rollout.engine.kind: 'parot' is unknown: did you mean parrot?" in refused.stderr


def test_its_backend_says_what_it_cannot_train_with(site: Path) -> None:
    lute = [*SETTINGS, "trainer.backend=lute"]
    taken, refused = volleys(site, lute, [*lute, "trainer.lora.rank=1"])
    assert "lute" in taken.stdout
    assert refused.returncode == 2
    assert "trainer.backend=lute: it has no words, or use trainer.backend=volley" in refused.stderr


def test_its_algorithm_has_a_section_with_checked_keys(site: Path) -> None:
    hum, hun = [*SETTINGS, "algorithm.name=hum", "algorithm.volume=3"], [*SETTINGS, "algorithm.name=hun"]
    shown, wrong = volleys(site, hum, hun)
    assert re.search(r"^algorithm.volume +3 +command line$", shown.stdout, re.MULTILINE)
    assert "algorithm.name='hun': did you mean hum?" in wrong.stderr


def test_its_key_stands_among_those_of_the_core(site: Path) -> None:
    given = [*SETTINGS, "run.shout=true"], ["config", "schema"], [*SETTINGS, "run.shuot=true"]
    shown, schema, wrong = volleys(site, *given)
    assert re.search(r"^run.shout +True +command line$", shown.stdout, re.MULTILINE)
    assert "With `shout`, the word is loud." in schema.stdout
    assert "unknown key run.shuot: did you mean run.shout?" in wrong.stderr


def test_its_sidecar_runs_beside_a_run(site: Path) -> None:
    program = """
from pathlib import Path
from shared.config import load
from shared.run.folder import RunFolder
from volley.local.sidecars import sidecars
config = load(["configs/quickstart.yaml"], ["run.shout=true", "run.dashboard=false"]).config
with sidecars(RunFolder(Path("r")), config):
    print("running")
"""
    done = python(site, "-c", program)
    assert (done.stdout.split(), done.stderr) == (["HELLO", "running", "bye"], "")


def test_without_the_package_of_views_a_run_ends_with_its_proof_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))
    folder = RunFolder(small_run.make(tmp_path / small_run.RUN))
    record = read_record(folder)
    assert record is not None
    assert train.finish(folder, record, prove=True) == 0
    *_, proven, done = capsys.readouterr().out.splitlines()
    assert proven == "proven: 10 groups, each trained exactly once"
    assert done.startswith("DONE: steps=5 elapsed_sec=")
    assert not folder.plot.exists()
    assert not folder.summary.exists()
    assert reports().main(folder.path) == 0
    with (
        Client(folder.path) as client,
        pytest.raises(ConfigError, match="the package volley-rl-dashboard, which is not"),
    ):
        client.trajectories()


def test_its_folder_is_proven(site: Path, tmp_path: Path) -> None:
    (tmp_path / "word").touch()
    done = volley(site, "verify", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "proven: a word\n", "")


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    other = site / "second-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n", encoding="utf-8")
    (other / "entry_points.txt").write_text("[volley.commands]\nword = second:COMMAND\n", encoding="utf-8")
    done = volley(site, "--help")
    assert done.returncode == 2
    assert "both fictitious and second bring word (volley.commands)" in done.stderr


def test_the_core_loads_without_any_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=PROJECT, capture_output=True, encoding="utf-8", check=False
    )
    absent = "it belongs to the package volley-rl-supervised, which is not installed"
    shown = f"frozen_lake\n['sglang_jax'] ['volley']\nFalse\nunknown key sft: {absent}\nmode=sft: {absent}\n"
    absent = "it belongs to the package volley-rl-algorithms, which is not installed"
    shown = f"{shown}algorithm.name='dppo': {absent}\n"
    absent = "it belongs to the package volley-rl-families, which is not installed"
    assert done.stdout == f"{shown}config.json: model_type='gemma2' is not supported: {absent}\n", done.stderr


def test_the_env_service_plays_without_any_package(site: Path, tmp_path: Path) -> None:
    done = python(site, "-c", PLAY, str(tmp_path / "environments"))
    shown = "200 405 frozen_lake\n{'status': 'ok', 'service': 'env'}\n"
    assert done.stdout == shown, done.stderr


def test_its_environments_stand_beside_those_of_the_core(site: Path, tmp_path: Path) -> None:
    done = python(site, "-c", PLAY, str(tmp_path / "environments"), "environments=fictitious:WordExtension")
    shown = "200 405 frozen_lake word\n{'status': 'ok', 'service': 'env', 'word': 'hello'}\n"
    assert done.stdout == shown, done.stderr


def test_a_run_that_needs_the_package_of_submissions_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))
    source = ConfiguredSource(FoundSource(tmp_path / "adder.py", None), "", {})
    settings = replace(from_config(load([PROJECT / "configs" / "quickstart.yaml"]).config), sources={"adder@1": source})
    with pytest.raises(ConfigError, match="environments: it belongs to the package volley-rl-sandbox, which is not"):
        open_extension(settings, ThreadRunner(1, 1.0, 1))


async def test_a_trainer_of_several_processes_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))
    two = "services.trainer.num_processes=2", "services.trainer.coordinator_address=127.0.0.1:4000"
    config = load([PROJECT / "configs" / "quickstart.yaml"], two).config
    with pytest.raises(ConfigError, match="processes: it belongs to the package volley-rl-multihost, which is not"):
        async with open_trainer_process(config):
            pytest.fail("it was opened")


def test_a_run_with_a_teacher_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "services.redis_url=redis://127.0.0.1:1", "services.orchestrator.teacher.url=http://127.0.0.1:1"
    config = load([PROJECT / "configs" / "chaos.yaml"], [*given, "algorithm.teacher_kl_coef=1"]).config
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))
    with pytest.raises(ConfigError, match="teachers: it belongs to the package volley-rl-algorithms, which is not"):
        orchestrator_settings(config)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "m", "--env", "frozen_lake"], "--env: it belongs to the package volley-rl-data, which is not"),
        (["train", "m", "--data", "x.csv"], "--data: it belongs to the package volley-rl-data, which is not"),
    ],
)
def test_a_command_without_its_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))

    def run() -> None:
        parsed = parse_arguments(arguments)
        parsed.command(parsed)

    with pytest.raises(ConfigError) as refused:
        run()
    assert told in f"{refused.value.detail} {refused.value.hint}"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["Client", "aio", "train"])
def test_a_name_of_python_programs_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda group: {} if group == packages.PARTS else found(group))
    with pytest.raises(ConfigError, match="python_api: it belongs to the package volley-rl-python, which is not"):
        getattr(import_module("volley"), name)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "OWNERS", {"lute": "volley-lute"})
    with pytest.raises(ConfigError, match="unknown key lute: it belongs to the package volley-lute, which is not"):
        load([PROJECT / "configs" / "quickstart.yaml"], ["lute.strings=6"])
    with pytest.raises(ConfigError, match="'lute' is unknown: it belongs to the package volley-lute, which is"):
        load([PROJECT / "configs" / "quickstart.yaml"], ["rollout.engine.kind=lute"])


def test_the_table_of_owners_is_that_of_the_packages() -> None:
    owners = {}
    for file in PROJECT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        points = project["entry-points"]
        names = {name for group in packages.NAMED for name in points.get(group, {})}
        owners |= dict.fromkeys(names, project["name"])
    assert owners == packages.OWNERS


def test_a_section_may_stand_in_any_section_and_in_no_other_place() -> None:
    class Word(PackageSection):
        word: str = "hello"

    found = extended(RunConfig, {"trainer.word": Word, "word": Word})
    config = found.model_validate({"model": {"path": "m"}, "data": {"env": "e"}, "word": {"word": "bye"}})
    assert isinstance(config, RunConfig)
    assert isinstance(config.trainer, TrainerSection)
    assert config.model_dump()["word"] == {"word": "bye"}
    assert config.model_dump()["trainer"]["word"] == {"word": "hello"}
    assert config.run.name == "quickstart"
    for place in ("trainer", "trainer.max_steps.word", "nothing.word"):
        with pytest.raises(ConfigError):
            extended(RunConfig, {place: Word})
