"""Every command line of the documentation runs: small ones for real, at services and a run of their own, the others up
to their parser.

A line that nobody here knows how to run fails.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shared import config
from shared.process.ports import free_port
from shared.run.folder import RunFolder
from tests.compose import compose_file
from tests.docs.commands import ROOT, blocks, first_example, yaml_of
from tests.fuzz.driver import in_a_thread
from tests.fuzz.stack import open_stack, run_config
from tests.support import small_run
from tests.support.net import wait_http
from tests.support.redis import configured
from tests.support.stack import SMALL
from tools.embedded_redis import embedded_server
from volley.__main__ import parse_arguments
from volley.layout import python_of, variables_of
from volley.runs import addresses

BLOCKS = blocks()
SCRIPTS = [block for block in BLOCKS if block.script]
LINES = [pytest.param(line, id=line[:60]) for block in BLOCKS if not block.script for line in block.lines]
RUNS = ("gsm8k", "quickstart", "live", "openai_sdk", "NAME")
FILES = {
    "compass.yaml": "configs/quickstart.yaml",
    "run.yaml": "configs/gsm8k_qwen3_4b_tpu.yaml",
    "mine.yaml": "configs/gsm8k.yaml",
}
AGENT = ("my_agent.py", "examples/agents/openai_sdk.py")
"""Which file the pages mean by a name that the reader chooses."""
SHORT = ("verify", "report", "status", "access", "env test compass.py")
"""Commands that are really run; the others train, or last for minutes."""
DOCKER = """#!/bin/sh
case "$*" in
  "compose exec env cat /run/secrets/token_viewer") cat "$TOKEN_VIEWER";;
  "compose exec env cat /run/secrets/token_admin") cat "$TOKEN_ADMIN";;
  "compose port --index 2 rollout 8102") echo "$ROLLOUT";;
  *) echo "not known here: docker $*" >&2; exit 1;;
esac
"""
PRELUDE = """set -eu -o pipefail
curl() { command curl --fail --no-progress-meter --noproxy '*' "$@"; }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder like the repository's, with a small run whose services answer."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "docker", ".venvs"):
        (folder / name).symlink_to(ROOT / name)
    made = small_run.make(folder / "runs" / small_run.RUN)
    for name in RUNS:
        (folder / "runs" / name).symlink_to(made)
    (folder / "bin").mkdir()
    (folder / "bin" / "docker").write_text(DOCKER, encoding="utf-8")
    (folder / "bin" / "docker").chmod(0o755)
    (folder / "stack").mkdir()
    (folder / "compass.py").write_text(first_example(), encoding="utf-8")
    with embedded_server(folder / "redis") as redis:
        run = run_config(folder / "stack", redis.url)
        run = run.model_copy(update={"run": run.run.model_copy(update={"name": small_run.RUN})})
        with in_a_thread(lambda: open_stack(run)) as urls:
            named = {("rollout-0" if name == "rollout" else name): url for name, url in urls.items()}
            addresses.write(RunFolder(made), named, {}, run.services)
            yield folder, urls, run.services


def shell(place, script, timeout_s=120):
    folder, urls, services = place
    path = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VOLLEY_")}
    files = services.token_files
    tokens = {"TOKEN_VIEWER": str(files.viewer), "TOKEN_ADMIN": str(files.admin)}
    more = {**tokens, "ROLLOUT": urls["rollout"].partition("://")[2]}
    return subprocess.run(
        ["bash", "-c", PRELUDE + script],
        cwd=folder,
        env={**kept, **more, "PATH": path},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def done_lines():
    return {}


def test_the_pages_have_commands_and_each_is_known():
    assert len(LINES) > 30
    assert len(SCRIPTS) == 10
    first = {re.sub(r"^([A-Z_]+=(\"[^\"]*\"|\S*) )+", "", line.values[0]).split()[0] for line in LINES}
    launched = {word for word in first if word.endswith("/tpu-vm.sh")}
    assert first - launched == {
        "make",
        "volley",
        "docker",
        "source",
        "python",
        "helm",
        "kubectl",
        "sh",
        "sbatch",
        "sky",
    }


@pytest.mark.parametrize("line", [line for line in LINES if not line.values[0].startswith("python")])
def test_a_line_runs(place, done_lines, line):
    variables, command = [], shlex.split(line)
    while re.match(r"[A-Z_]+=", command[0]):
        variables.append(command.pop(0))
    if command[0] == "make":
        done = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
    elif command[0] == "volley" and " ".join(command[1:]).startswith(SHORT):
        same = re.sub(rf"\bruns/({'|'.join(RUNS)})\b", f"runs/{RUNS[0]}", line)  # all are one folder
        done = done_lines.get(same) or done_lines.setdefault(same, shell(place, same))
    elif command[0] == "volley":
        arguments = parse_arguments(command[1:])
        given = getattr(arguments, "config", None) or ()
        if given:
            overrides = getattr(arguments, "rest", None) or getattr(arguments, "overrides", ())
            overrides = [one.replace(*AGENT) for one in overrides]
            config.load([ROOT / FILES.get(path, path) for path in given], overrides)
        return
    elif command[0] == "source":
        done = shell(place, f"set +u; {line}; volley --help")
    elif command[0] == "sh":
        done = subprocess.run(["sh", "-n", command[1]], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
    elif command[0] in ("helm", "kubectl"):
        cluster(command)
        return
    elif command[0] in ("sbatch", "sky") or command[0].endswith(".sh"):
        script = next(Path(word).name for word in command if word.startswith("launch/"))
        assert script in {"sbatch": "job.sh", "sky": "task.yaml"}.get(command[0], "tpu-vm.sh")
        return
    else:
        docker(command[1:], dict(variable.split("=", 1) for variable in variables))
        return
    assert done.returncode == 0, done.stdout + done.stderr


def cluster(command):
    """No cluster is needed to see that a command names files, containers and objects of the chart."""
    templates = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy/helm/volley/templates").iterdir())
    assert all((ROOT / word).exists() for word in command if word.startswith("deploy/"))
    for option, text in (("-c", "- name: {}\n"), ("-l", '"component" "{}"')):
        if option in command:
            name = command[command.index(option) + 1].rpartition("=")[2]
            assert text.format(name) in templates.replace("  # ", "\n"), name


def docker(command, variables):
    """No engine is needed to see that a command names what there is."""
    if command[0] == "build":
        file, argument = ROOT / command[command.index("-f") + 1], command[command.index("--build-arg") + 1]
        name, _, value = argument.partition("=")
        assert f"ARG {name}" in file.read_text(encoding="utf-8")
        assert f"\n{value} = " in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        return
    services = compose_file.services()
    assert command[0] == "compose"
    if command[1] == "--profile":
        assert any(service.get("profiles") == [command[2]] for service in services.values())
        command = [command[0], *command[3:]]
    if command[1] == "run":
        *given, service = itertools.takewhile(lambda word: word != "volley", command[2:])
        assert (set(given) <= {"--rm", "--no-deps"}, service in services) == (True, True), command
        parse_arguments(command[command.index("volley") + 1 :])
        return
    flags = {"up": {"--scale", "--build", "--detach"}, "down": {"--volumes"}, "logs": {"-f"}}.get(command[1], set())
    assert command[1] in ("up", "down", "logs", "cp", "stop", "create"), command
    for word in command[2:]:
        assert word in flags or re.split("[=:]", word)[0] in services or word.startswith("./"), word
    if "VOLLEY_CONFIG" in variables or "VOLLEY_OVERRIDES" in variables:
        path = ROOT / variables.get("VOLLEY_CONFIG", "configs/quickstart.yaml")
        config.load([path, ROOT / "docker/stack.yaml"], shlex.split(variables.get("VOLLEY_OVERRIDES", "")))


@pytest.fixture(scope="module")
def certificates(place):
    """What the block that makes them said: they can be made once in a folder."""
    (block,) = (block for block in SCRIPTS if "mkdir secrets" in block.lines[0])
    return shell(place, "\n".join(block.lines))


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_script_runs(place, block, request):
    folder, urls, _ = place
    text = "\n".join(block.lines).replace("_URL/runs/quickstart", f"_URL/runs/{small_run.RUN}")
    if block.page == "deploy.md":
        text = text.replace("http://127.0.0.1:8101", urls["env"])
    if "python -m services.env" in text:
        request.getfixturevalue("certificates")
        text = secured(folder, text)
    done = request.getfixturevalue("certificates") if "mkdir secrets" in text else shell(place, text)
    assert done.returncode == 0, done.stdout + done.stderr


def secured(folder, text):
    """A service that is started in front of the calls, at a port that is free; it ends with the script."""
    (folder / "security.yaml").write_text(yaml_of("security.md", "services:\n  token_files"), encoding="utf-8")
    port = free_port()
    start, rest = text.split("\n", 1)
    wait = (
        f"until command curl -s --cacert secrets/ca.pem https://localhost:{port}/health; do kill -0 $!; sleep 0.2; done"
    )
    return f"{start} services.env.port={port} &\ntrap 'kill %1' EXIT\n{wait}\n{rest.replace(':8101', f':{port}')}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_services_start_as_on_several_hosts(tmp_path):
    """The lines as they are, each with the Python of its environment, at free ports: every service answers, and follow
    watches.
    """
    lines = [
        one for line in LINES if (one := line.values[0]).startswith("python -m services") and "process_id" not in one
    ]
    assert len(lines) == 4
    ports = {name: free_port() for name in ("env", "rollout", "orchestrator", "trainer")}
    processes = []
    with embedded_server(tmp_path / "redis") as redis:
        tree = yaml.safe_load((ROOT / SMALL).read_text(encoding="utf-8"))
        tree["run"]["dir"], tree["model"]["path"] = str(tmp_path), str(ROOT / tree["model"]["path"])
        tree["services"] = {**configured(redis.url, tmp_path), **{name: {"port": port} for name, port in ports.items()}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        try:
            for line in lines:
                name = re.search(r"services\.(\w+)", line)[1]
                environment = name if name in ("rollout", "trainer") else "base"
                command = line.replace("python", str(python_of(environment)), 1).replace(
                    ":8102", f":{ports['rollout']}"
                )
                variables = variables_of(environment, cpu=True)
                log = (tmp_path / f"{name}.log").open("wb")
                processes.append(
                    subprocess.Popen(f"exec {command}", shell=True, cwd=tmp_path, env=variables, stdout=log, stderr=log)
                )
                wait_http(f"http://127.0.0.1:{ports[name]}/health", 240)
        finally:
            for process in processes:
                process.terminate()
            codes = [process.wait(60) for process in processes]
    assert codes == [0, 0, 0, 0], [path.read_text(encoding="utf-8")[-2000:] for path in tmp_path.glob("*.log")]
