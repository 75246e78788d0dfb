"""`volley launch`: its folder and notes, bad input, and the logic of its scripts around programs that only sleep.

The commands of Slurm and gcloud are stubs that start real processes (tests/support/slurm.py, gcloud.py).
tests/deploy/test_launched_runs.py has whole runs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from shared import config
from shared.errors import ConfigError
from tests.support import gcloud
from tests.support.slurm import Cluster, cluster
from volley.__main__ import parse_arguments
from volley.printing import json_output
from volley_launch.hosts import FIRST_PORT, Hosts
from volley_launch.scripts import slug

QUICKSTART, TPU = "configs/quickstart.yaml", "configs/gsm8k_qwen3_4b_tpu.yaml"
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
DATA = ("data.train=/data/train.jsonl", "data.eval=/data/eval.jsonl")
TWO = ("services.trainer.num_processes=2", "trainer.mesh.shape=[4,2]")
ODD = "a b'c$(touch x);%j"
"""Name of a folder that a shell or sbatch would read otherwise if it were not quoted."""


def launched(*arguments: str) -> int:
    given = parse_arguments(["launch", *arguments])
    return given.command(given)


def test_a_launch_writes_a_configuration_without_addresses_and_secrets_of_its_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with json_output():
        assert launched("slurm", "--config", TPU, "--nodes=4", f"--out={out}", f"run.dir={tmp_path}") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"] == [{"redis": 1, "env": 1, "orchestrator": 1, "trainer": 1}, *[{"rollout": 1}] * 3]
    assert any("services.redis_url" in note and "services.trainer.url" in note for note in told["notes"])
    services = config.load([out / "run.yaml"]).config.services
    assert (services.redis_url, services.trainer.url, services.token_files.admin) == (None, None, None)
    assert config.load([out / "run.yaml"]).config.run.date is not None
    secrets = {path.name: path.read_text(encoding="utf-8") for path in (out / "secrets").iterdir()}
    assert set(secrets) == {"redis_password", "token_viewer", "token_service", "token_admin"}
    assert len(set(secrets.values())) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in (out, out / "secrets")} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (out / "secrets").iterdir()} == {0o600}
    written = "".join(path.read_text(encoding="utf-8") for path in (out / "run.yaml", out / "job.sh"))
    assert not any(secret in written for secret in secrets.values())
    launched("slurm", "--config", TPU, "--nodes=5", f"--out={out}", f"run.dir={tmp_path}")
    assert {path.name: path.read_text(encoding="utf-8") for path in (out / "secrets").iterdir()} == secrets


REFUSED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "too few nodes": (["slurm", "--config", TPU, "--nodes=2", *TWO], ["2 hosts", "at least 3", "num_processes"]),
    "a trainer of two on one node": (["slurm", "--config", TPU, "--nodes=1", *TWO], ["at least 3"]),
    "no nodes": (["slurm", "--config", QUICKSTART, "--nodes=0"], ["--nodes 0"]),
    "supervised on two": (["slurm", "--config", QUICKSTART, "mode=sft", "--nodes=2"], ["mode=sft"]),
    "an engine elsewhere": (
        ["slurm", "--config", QUICKSTART, "rollout.engine.kind=sglang", "rollout.engine.url=http://e:1"],
        ["rollout.engine.url"],
    ),
    "not an option": (["slurm", "--config", QUICKSTART, "--sbatch=partition"], ["--sbatch", "partition"]),
    "two lines": (["slurm", "--config", QUICKSTART, "--sbatch=--comment=a\nrm"], ["--sbatch"]),
    "no shared disk": (["sky", "--config", TPU, *TWO, "run.dir=runs"], ["run.dir=runs", "checkpoint"]),
    "not a resource": (["sky", "--config", QUICKSTART, "--resource=H100"], ["--resource", "H100"]),
    "tpu-vm on CPUs": (["tpu-vm", "--config", QUICKSTART, "--zone=z", "--trainer-type=v4-8"], ["device=cpu"]),
    "not an option of gcloud": (
        ["tpu-vm", "--config", TPU, "--zone=z", "--trainer-type=v4-8", "run.dir=runs", *DATA, "--create=spot"],
        ["--create", "spot"],
    ),
    "no zone": (["tpu-vm", "--config", TPU, "--zone=", "--trainer-type=v4-8"], ["--zone"]),
    "no slices": (
        ["tpu-vm", "--config", TPU, "--zone=z", "--trainer-type=v4-8", "--rollout-type=v4-8"],
        ["--rollout-type", "--rollout-slices"],
    ),
    "fewer than no slices": (
        ["tpu-vm", "--config", TPU, "--zone=z", "--trainer-type=v4-8", "--rollout-type=v4-8", "--rollout-slices=-1"],
        ["--rollout-slices -1"],
    ),
    "no data": (["sky", "--config", QUICKSTART, "data.train=my.jsonl"], ["data.train=my.jsonl", "no such file"]),
    "a certificate that is not copied": (
        ["sky", "--config", QUICKSTART, "services.tls.ca_file=ca.pem"],
        ["services.tls.ca_file=ca.pem", "absolute"],
    ),
    "no type": (
        ["tpu-vm", "--config", TPU, "--zone=z", "--trainer-type=v4-8", "--rollout-slices=2"],
        ["--rollout-type"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    arguments, words = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        launched(*arguments, f"--out={tmp_path / 'out'}")
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    launched("slurm", "--config", QUICKSTART, f"--out={tmp_path}")
    with pytest.raises(ConfigError, match="belongs to the run quickstart"):
        launched("slurm", "--config", QUICKSTART, "run.name=other", f"--out={tmp_path}")


def test_hosts_agree_on_addresses_and_ports(tmp_path: Path) -> None:
    loaded = config.load([TPU], [*TWO, "services.rollout_replicas=2"]).config
    hosts = Hosts.of(loaded, ("n0", "10.0.0.2", "n2", "fd00::3"), FIRST_PORT, tmp_path)
    layers = [config.load([TPU], [*TWO], given=hosts.layer(i)).config.services for i in range(4)]
    assert [layer.trainer.process_id for layer in layers] == [0, 1, 0, 0]
    assert {layer.trainer.coordinator_address for layer in layers} == {"n0:8105"}
    assert {layer.base_url("trainer") for layer in layers[1:]} == {"http://n0:8104"}
    assert {layer.redis_url for layer in layers[1:]} == {"redis://n0:8106/0"}
    assert (layers[0].redis_url, layers[0].trainer.url) == (None, None)
    assert [hosts.place(i).listen for i in range(4)] == ["0.0.0.0", "10.0.0.2", "0.0.0.0", "fd00::3"]
    assert [dict(hosts.place(i).counts) for i in (1, 2)] == [{"trainer": 1}, {"rollout": 2}]
    with pytest.raises(ConfigError, match="--index 4"):
        hosts.place(4)
    for addresses, words in ((("n0", "n1"), "at least 3"), (("n0", "n0", "n1"), "twice")):
        with pytest.raises(ConfigError, match=words):
            Hosts.of(loaded, addresses, FIRST_PORT, tmp_path)


def test_a_task_of_skypilot_copies_files_and_secrets(tmp_path: Path) -> None:
    data = tmp_path / "train 's$et.jsonl"
    data.touch()
    options = ["--nodes=3", "--resource=accelerators=H100:8", "--resource=use_spot=True", "rollout.engine.device=gpu"]
    more = [f"data.train={data}", "run.bucket=s3://b/p", "run.name=A.b_c", f"--out={tmp_path / ODD}"]
    launched("sky", "--config", "configs/gsm8k.yaml", *options, *more)
    task = yaml.safe_load((tmp_path / ODD / "task.yaml").read_text(encoding="utf-8"))
    assert (task["name"], task["num_nodes"]) == (slug("A.b_c"), 3)
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": True}
    mounts = task["file_mounts"]
    assert mounts["~/volley-launch/secrets"] == str(tmp_path / ODD / "secrets")
    given = config.load([tmp_path / ODD / "run.yaml"]).config
    assert mounts[f"~/{str(given.data.train).removeprefix('../')}"] == str(data)
    assert all(re.fullmatch(r"~/[A-Za-z0-9._/-]+", path) for path in mounts), (
        "scp and shells read other names otherwise"
    )
    assert "VOLLEY_ACCELERATOR=gpu" in task["setup"]


def test_no_two_runs_have_slices_of_the_same_name() -> None:
    names = ["a-b", "a.b", "a_b", "A.b", "a-b-", "a..b", "x" * 60, "x" * 61, "x" * 43, "7"]
    made = [slug(name) for name in names]
    assert (made[0], made[-1]) == ("volley-a-b", "volley-7")
    assert len(set(made)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,48}[a-z0-9]", one) for one in made)


VOLLEY = """#!/bin/bash
# Stands for `volley`: appends its arguments to a file, and does what BEHAVIOUR (bash) says about the host $i.
here=$(dirname "$0"); echo "$*" >>"$here/calls"
i=0; while [ $# -gt 0 ]; do [ "$1" = --index ] && i=$2; shift; done
n=$(($(cat "$here/n$i" 2>/dev/null || echo 0) + 1)); echo $n >"$here/n$i"
trap 'exit 143' TERM
finish() { [ $1 = 0 ] && echo '"finished": true' >"$here/../quickstart/run.json"; exit $1; }
wait_for() { for _ in $(seq 3000); do [ -e "$here/$1" ] && return; sleep 0.1 & wait $!; done; }
"""


@contextmanager
def job(tmp_path: Path, behaviour: str, n_nodes: int = 3) -> Iterator[tuple[Cluster, Path, Path]]:
    """A cluster, the script of a run, and the folder in which `volley` notes its calls."""
    folder = tmp_path / "bin dir"
    folder.mkdir()
    (folder / "volley").write_text(VOLLEY + behaviour, encoding="utf-8")
    (folder / "volley").chmod(0o755)
    (tmp_path / "quickstart").mkdir()
    options = [f"--nodes={n_nodes}", f"--out={tmp_path / ODD}", f"--volley={folder / 'volley'}"]
    launched("slurm", "--config", QUICKSTART, f"run.dir={tmp_path}", *options)
    with cluster(tmp_path / "slurm", NODES, tmp_path / "none", VOLLEY_POLL="0.05") as slurm:
        yield slurm, tmp_path / ODD / "job.sh", folder


def until_started(folder: Path, *times: int) -> None:
    """Wait until `volley` has been started so many times on each node."""
    deadline = time.monotonic() + 120
    for i, n in enumerate(times):
        while not (counted := folder / f"n{i}").exists() or counted.read_text(encoding="utf-8") != f"{n}\n":
            assert time.monotonic() < deadline
            time.sleep(0.02)


SLOW = "case $i in 0) wait_for end; finish ${CODE-0};; *) wait_for never;; esac"


def test_a_job_runs_a_step_on_each_node_and_ends_with_the_first(tmp_path: Path) -> None:
    with job(tmp_path, SLOW) as (slurm, script, folder):
        running = slurm.submit(script, CODE="1")
        until_started(folder, 1, 1, 1)
        assert "start 1: 3 nodes" in running.text()
        (folder / "end").touch()
        assert running.wait() == 1, running.text()
        assert slurm.left() == []
        calls = sorted((folder / "calls").read_text(encoding="utf-8").splitlines())
    hosts = ",".join(NODES[:3])
    assert calls == [f"node {script.parent} --hosts {hosts} --index {i} --first-port 20210" for i in range(3)]
    assert "the first node (127.0.0.2) ended with exit code 1" in running.text()


def test_a_job_of_one_node_trains_there(tmp_path: Path) -> None:
    with job(tmp_path, "finish 0", n_nodes=1) as (slurm, script, folder):
        assert slurm.submit(script).wait() == 0
        assert (folder / "calls").read_text(encoding="utf-8") == f"train --config {script.parent / 'run.yaml'}\n"


def test_a_node_that_fails_is_named_and_tried_again_and_one_that_is_lost_left_out(tmp_path: Path) -> None:
    with job(tmp_path, "[ $i$n = 11 ] && exit 7; " + SLOW) as (slurm, script, folder):
        running = slurm.submit(script, VOLLEY_RETRY_PAUSE="0", VOLLEY_RETRIES="2")
        running.wait_for(r"node 127.0.0.3 \(rollout\) ended with exit code 7; Slurm says it is allocated")
        until_started(folder, 1, 2, 1)
        slurm.kill_node("127.0.0.4")
        running.wait_for(r"node 127.0.0.4 \(rollout\) ended before the run; Slurm says it is down")
        running.wait_for(r"node 127.0.0.4 \(rollout\) is given up after 2 more tries")
        (folder / "end").touch()
        assert running.wait() == 0, running.text()
        assert (folder / "n1").read_text(encoding="utf-8") == "2\n"


def test_a_job_that_slurm_queues_again_names_the_node_that_died(tmp_path: Path) -> None:
    with job(tmp_path, "[ $i$n = 02 ] && sleep 0.5 && finish 0; " + SLOW) as (slurm, script, folder):
        running = slurm.submit(script)
        until_started(folder, 1, 1, 1)
        slurm.kill_node("127.0.0.3", ends_job=True)
        assert running.wait() == 0, running.text()
        assert "node 127.0.0.3 of an earlier start is down*" in running.text()
        assert "start 2: 3 nodes: 127.0.0.2 127.0.0.4 127.0.0.5" in running.text()


def test_without_a_rollout_node_the_job_is_queued_again_on_other_nodes(tmp_path: Path) -> None:
    with job(tmp_path, "[ $i$n = 02 ] && sleep 0.5 && finish 0; " + SLOW, n_nodes=2) as (slurm, script, folder):
        running = slurm.submit(script, VOLLEY_RETRY_PAUSE="0", VOLLEY_RETRIES="1")
        until_started(folder, 1, 1)
        assert "start 1: 2 nodes: 127.0.0.2 127.0.0.3" in running.text()
        slurm.kill_node("127.0.0.3")
        assert running.wait() == 0, running.text()
        assert "queueing job 7 again" in running.text()
        assert "start 2: 2 nodes: 127.0.0.2 127.0.0.4" in running.text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_the_time_limit_queues_the_job_again_and_a_cancellation_does_not(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with job(tmp_path, "[ $i$n = 02 ] && sleep 0.5 && finish 0; " + SLOW) as (slurm, script, folder):
        running = slurm.submit(script)
        until_started(folder, 1, 1, 1)
        os.kill(int((slurm.folder / "batch").read_text(encoding="utf-8")), number)
        assert running.wait() == code, running.text()
        assert ("start 2" in running.text()) == (code == 0)


def test_a_first_node_that_is_lost_without_an_error_has_not_finished_the_run(tmp_path: Path) -> None:
    with job(tmp_path, "exit 0") as (slurm, script, _):
        assert slurm.submit(script).wait() == 1


def test_a_wrong_configuration_ends_the_job_for_good(tmp_path: Path) -> None:
    with job(tmp_path, "[ $i = 2 ] && exit 2; " + SLOW) as (slurm, script, _):
        running = slurm.submit(script)
        assert running.wait() == 2, running.text()
        assert "start 2" not in running.text()


def test_a_run_that_is_not_on_the_new_first_node_does_not_begin_anew(tmp_path: Path) -> None:
    with job(tmp_path, SLOW) as (slurm, script, folder):
        record, begun = tmp_path / "quickstart" / "run.json", script.parent / "hosts" / "begun"
        record.touch()
        running = slurm.submit(script)
        until_started(folder, 1, 1, 1)
        while not begun.exists():
            running.wait_for("start 1")
        record.unlink()
        os.kill(int((slurm.folder / "batch").read_text(encoding="utf-8")), signal.SIGUSR1)
        assert running.wait() == 2
        assert "is not on 127.0.0.2" in running.text()
        assert slurm.submit(script, VOLLEY_AGAIN="yes").wait() == 2


def test_a_job_with_fewer_nodes_than_the_run_needs_says_so(tmp_path: Path) -> None:
    with job(tmp_path, SLOW) as (slurm, script, folder):
        running = slurm.submit(script, "--nodes=1")
        assert running.wait() == 2
        assert "the run needs 2" in running.text()
        assert not (folder / "calls").exists()


def test_a_task_of_a_job_array_starts_nothing(tmp_path: Path) -> None:
    with job(tmp_path, SLOW) as (slurm, script, folder):
        running = slurm.submit(script, SLURM_ARRAY_JOB_ID="7", STUB_SLURM_TASK="0")
        assert running.wait() == 2
        assert "without --array" in running.text()
        assert not (folder / "calls").exists()


def test_a_job_that_a_task_of_an_array_has_submitted_starts(tmp_path: Path) -> None:
    """It has the variables of that task."""
    with job(tmp_path, "finish 0", n_nodes=1) as (slurm, script, _):
        running = slurm.submit(script, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="0")
        assert running.wait() == 0, running.text()


REMOTE_VOLLEY = """#!/bin/bash
echo "$*" >>~/calls; ls -ld --time-style=+ ~/volley-launch/secrets/* | cut -c1-10 | sort -u >~/modes
case "$*" in *"--index 0"*|train*) sleep 0.2; exit ${CODE-0};; *) trap 'exit 143' TERM; exit ${OTHER-0};; esac
"""


def tpu_vm(tmp_path: Path, *arguments: str) -> tuple[Path, dict[str, str]]:
    """The script of a run on slices that are created, and the variables to call it with."""
    data = tmp_path / "my train.jsonl"
    data.write_text("{}", encoding="utf-8")
    given = ["--config", TPU, f"data.train={data}", "data.eval=null", f"run.dir={tmp_path}", f"--out={tmp_path / ODD}"]
    launched("tpu-vm", *given, "--zone=us-central2-b", "--create=--spot", *arguments)
    variables = {"STUB_GCLOUD": str(tmp_path / "cloud"), "CODE": "0", "OTHER": "0"}
    variables["PATH"] = f"{gcloud.install(tmp_path / 'cloud')}{os.pathsep}{os.environ['PATH']}"
    script = tmp_path / ODD / "tpu-vm.sh"
    subprocess.run([script, "create"], env=variables, check=True)
    for home in (tmp_path / "cloud").glob("*/worker*"):
        program = home / "volley" / ".venvs" / "base" / "bin" / "volley"
        program.parent.mkdir(parents=True)
        program.write_text(REMOTE_VOLLEY, encoding="utf-8")
        program.chmod(0o755)
    return script, variables


def called(script: Path, variables: dict[str, str], *command: str) -> tuple[int, str]:
    done = subprocess.run([script, *command], env=variables, capture_output=True, encoding="utf-8", timeout=180)
    return done.returncode, done.stdout + done.stderr


def test_tpu_vms_get_configuration_files_and_secrets_and_end_with_the_first(tmp_path: Path) -> None:
    types = ["--trainer-type=v4-16", "--rollout-type=v4-8", "--rollout-slices=2"]
    script, variables = tpu_vm(tmp_path, *types, *TWO)
    code, text = called(script, variables | {"CODE": "3", "OTHER": "7"}, "start")
    assert (code, text.count("exit code 7")) == (3, 3), text
    assert "the first host ended with exit code 3" in text
    homes = sorted((tmp_path / "cloud").glob("*/worker*"))
    assert [home.relative_to(tmp_path / "cloud").parts for home in homes] == [
        ("volley-gsm8k-qwen3-4b-rollout-0", "worker0"),
        ("volley-gsm8k-qwen3-4b-rollout-1", "worker0"),
        ("volley-gsm8k-qwen3-4b-trainer", "worker0"),
        ("volley-gsm8k-qwen3-4b-trainer", "worker1"),
    ]
    hosts = "127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5"
    for home, index in zip(homes, (2, 3, 0, 1), strict=True):
        told = (home / "calls").read_text(encoding="utf-8")
        assert told == f"node {home}/volley-launch --hosts {hosts} --index {index}\n"
        assert (home / "modes").read_text(encoding="utf-8") == "-rw-------\n"
        given = config.load([home / "volley-launch" / "run.yaml"]).config
        assert (home / "volley" / str(given.data.train)).read_text(encoding="utf-8") == "{}"
    assert called(script, variables, "stop")[0] == 0
    assert called(script, variables, "delete", "volley-gsm8k-qwen3-4b-rollout-1")[0] == 0
    assert not (tmp_path / "cloud" / "volley-gsm8k-qwen3-4b-rollout-1").exists()
    code, text = called(script, variables, "create")
    assert (code, text.count("exists")) == (0, 2), text
    assert called(script, variables, "delete", "other")[0] == 2
    subprocess.run([script, "delete", "volley-gsm8k-qwen3-4b-rollout-0"], env=variables, check=True)
    code, text = called(script, variables, "delete")
    assert (code, "not deleted: volley-gsm8k-qwen3-4b-rollout-0" in text) == (1, True), text
    assert not list((tmp_path / "cloud").glob("*/worker*"))


def test_a_single_tpu_vm_trains_alone(tmp_path: Path) -> None:
    script, variables = tpu_vm(tmp_path, "--trainer-type=v4-8")
    assert called(script, variables, "start")[0] == 0
    (home,) = (tmp_path / "cloud").glob("*/worker*")
    assert (home / "calls").read_text(encoding="utf-8") == f"train --config {home}/volley-launch/run.yaml\n"


def test_a_start_stops_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    script, variables = tpu_vm(tmp_path, "--trainer-type=v4-8", "--rollout-type=v4-8", "--rollout-slices=1")
    homes = sorted((tmp_path / "cloud").glob("*/worker*"))
    rollout, trainer = (home / "volley" / ".venvs" / "base" / "bin" / "volley" for home in homes)
    rollout.write_text(
        '#!/bin/bash\ntrap "sleep 0.3; echo end >>~/told; exit 143" TERM; echo start >>~/told\n'
        "for _ in $(seq 600); do sleep 0.1; done",
        encoding="utf-8",
    )
    ends_once_the_other_runs = f'until [ "$(tail -n 1 {homes[0]}/told)" = start ]; do sleep 0.05; done'
    trainer.write_text(f"#!/bin/bash\n{ends_once_the_other_runs}", encoding="utf-8")
    variables["VOLLEY_SETTLE"] = "0"
    subprocess.run([script, "start"], env=variables, check=True, stdout=subprocess.DEVNULL, timeout=180)
    try:
        code, text = called(script, variables, "start")
        assert (code, "still running" in text) == (0, True), text
    finally:
        assert called(script, variables, "stop")[0] == 0
    assert (homes[0] / "told").read_text(encoding="utf-8").split() == ["start", "end"] * 2


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (["--trainer-type=v4-16"], "has 2 hosts, and services.trainer.num_processes is 1"),
        (["--trainer-type=v4-8", "--rollout-type=v4-16", "--rollout-slices=1"], "a rollout server takes a single one"),
    ],
)
def test_slices_of_another_size_are_refused(tmp_path: Path, types: list[str], words: str) -> None:
    script, variables = tpu_vm(tmp_path, *types)
    code, text = called(script, variables, "start")
    assert (code, words in text) == (2, True), text
