"""The chart, rendered by Helm's own code and checked against the published schemas of its objects."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared import boot, config
from shared.process import exit_codes
from shared.services import SERVICES
from tests.deploy.test_values import CHART, ROOT, VALUES, values_of
from tests.support import foreign, helm_render

pytestmark = pytest.mark.long

RELEASES = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
"""Releases of Kubernetes, from the oldest that the chart supports."""
FIXTURES = ROOT / "tests" / "fixtures" / "kubernetes"
SCHEMAS = {
    kind: {
        release: found["schema"]
        for release, found in json.loads((FIXTURES / f"{kind.lower()}.json").read_text(encoding="utf-8")).items()
    }
    for kind in ("JobSet", "ScaledObject", "PodMonitor", "PrometheusRule")
}
GOOD = {path.stem: values_of(path) for path in VALUES}
JOBSET = {"enabled": True}
REFUSED: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "no bucket": ({"trainer": {"storage": {"kind": "bucket"}}}, ["trainer.storage.kind=bucket", "config.run.bucket"]),
    "bucket of another kind": ({"config": {"run": {"bucket": "az://b/p"}}}, ["config.run.bucket=az://b/p", "gs://"]),
    "no shared run folder": (
        {"trainer": {"hosts": 4, "jobset": JOBSET}},
        ["trainer.hosts=4", "trainer.slices=1", "4 processes", "ReadWriteMany"],
    ),
    "hosts without JobSet": (
        {"trainer": {"hosts": 2, "storage": {"kind": "shared", "claim": "runs"}}},
        ["trainer.hosts=2", "trainer.jobset.enabled"],
    ),
    "shared without a claim": ({"trainer": {"storage": {"kind": "shared"}}}, ["trainer.storage.claim"]),
    "a claim that is not used": ({"trainer": {"storage": {"claim": "runs"}}}, ["trainer.storage.claim=runs"]),
    "no replicas": ({"rollout": {"replicas": 0}}, ["/rollout/replicas", "minimum"]),
    "value set to null": ({"trainer": {"storage": None}}, ["/trainer", "storage"]),
    "bucket that Volley refuses": ({"config": {"run": {"bucket": "gs://b/p q"}}}, ["config.run.bucket=gs://b/p q"]),
    "bucket that is a number": ({"config": {"run": {"bucket": 5}}}, ["/config/run/bucket"]),
    "service without keys": ({"config": {"services": {"env": "x"}}}, ["/config/services/env"]),
    "label of a selector": ({"env": {"podLabels": {"app.kubernetes.io/component": "x"}}}, ["component"]),
    "folder that the chart sets": (
        {"config": {"services": {"env": {"folder": "/data"}}}},
        ["config.services.env.folder"],
    ),
    "unknown value": ({"rollout": {"autoscale": True}}, ["/rollout", "autoscale"]),
    "autoscaler without Prometheus": ({"rollout": {"autoscaling": {"enabled": True}}}, ["autoscaling.prometheus"]),
    "autoscaler upside down": (
        {"rollout": {"autoscaling": {"enabled": True, "prometheus": "http://p", "minReplicas": 9}}},
        ["minReplicas=9", "maxReplicas=4"],
    ),
    "no Redis": ({"redis": {"enabled": False}}, ["redis.url"]),
    "two Redis": ({"redis": {"url": "redis://elsewhere:6379"}}, ["redis.url"]),
    "supervised run": ({"config": {"mode": "sft"}}, ["config.mode=sft"]),
    "address that the chart sets": (
        {"config": {"services": {"trainer": {"url": "http://t"}}}},
        ["config.services.trainer.url"],
    ),
}


ODD: dict[str, Any] = {
    "imagePullSecrets": [{"name": "1e7"}],
    "images": {"base": "registry:5000/base@sha256:" + "0" * 64, "redis": "8"},
    "config": {
        "run": {"name": "1e7", "bucket": "s3://bucket/007/"},
        "services": {"limits": {"grace_s": 600}},
        "trainer": {"max_steps": 10_000_000, "optimizer_config": {"learning_rate": 1e-6}},
        "data": {"env_config": {"small": 1e-7, "text": "{{ .Values }}: 'a' \"b\"\n# c\n- 1e-7\n", "flag": "yes"}},
    },
    "secrets": {"existingSecret": "0x10"},
    "redis": {"storage": {"size": "100k", "class": "1_000"}, "extraEnv": [{"name": "MALLOC_ARENA_MAX", "value": "1"}]},
    "env": {
        "storage": {"size": "1e10"},
        "podAnnotations": {"note": "a: 'b' # \"c\"\n{{ .Release.Name }}", "empty": ""},
        "securityContext": {"readOnlyRootFilesystem": False, "capabilities": {"add": ["SYS_RESOURCE"]}},
        "resources": {"limits": {"cpu": 0.5, "memory": 4_000_000_000}},
        "startSeconds": 10_000_000,
    },
    "trainer": {
        "backoffLimit": 10_000_000,
        "kueueQueue": "123",
        "extraEnv": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}],
        "jobset": {"enabled": True, "exclusiveTopology": "a: b, c"},
        "storage": {"kind": "shared", "claim": "0b1"},
        "hosts": 2,
        "slices": 1000,
    },
    "rollout": {
        "kueueQueue": "true",
        "cache": {"claim": "1e7"},
        "autoscaling": {
            "enabled": True,
            "maxReplicas": 1_000_000,
            "targetRequests": 1_000_000,
            "prometheus": "https://p/#a",
            "query": 'sum(a{b="c\\n"})',
            "authentication": "007",
        },
    },
    "protectFromEviction": True,
    "networkPolicy": {"prometheusNamespace": "123"},
    "monitoring": {"podMonitor": True, "rules": True, "grafana": True, "labels": {"release": "1"}},
}
"""Values that YAML would read as something else if a template wrote them without quotes."""


def render(
    cases: Mapping[str, Any],
    releases: Sequence[str] = (),
    apiserver: str | None = None,
    name: str = "run",
    namespace: str = "team",
) -> dict[str, Any]:
    """Answer of `helm_render`; objects are checked against these releases of Kubernetes."""
    python = foreign.environment("helm", helm_render.REQUIREMENTS)
    asked = {"chart": str(CHART), "cases": cases, "releases": releases, "schemas": SCHEMAS, "apiserver": apiserver}
    asked |= {"name": name, "namespace": namespace}
    done = subprocess.run(
        [python, helm_render.__file__],
        input=json.dumps(asked),
        capture_output=True,
        encoding="utf-8",
        timeout=110,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    return render(GOOD | {name: values for name, (values, _) in REFUSED.items()}, RELEASES)


@pytest.fixture(params=sorted(GOOD))
def case(request: pytest.FixtureRequest, rendered: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Values and objects."""
    answer = rendered[request.param]
    assert "error" not in answer, answer
    assert answer["faults"] == []
    return GOOD[request.param], answer["objects"]


def of_kind(objects: Sequence[Mapping[str, Any]], *kinds: str) -> list[Any]:
    return [made for made in objects if made["kind"] in kinds]


def pods(objects: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Templates of Pods, each with its metadata."""
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if made["kind"] in ("Deployment", "StatefulSet", "Job", "JobSet"):
            yield spec["template"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def by_name(objects: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for pod in pods(objects) for container in containers(pod)}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_by_name(name: str, rendered: dict[str, Any]) -> None:
    error = rendered[name]["error"]
    for part in REFUSED[name][1]:
        assert part in error, error


def test_pods_keep_the_restricted_policy(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    for pod in pods(case[1]):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        assert all("sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}) for volume in spec["volumes"])
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert not [one for one in container.get("env", ()) if "secret" in json.dumps(one).lower()]


def test_a_wrong_configuration_ends_the_run_at_once_and_a_preemption_does_not(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    (made,) = of_kind(case[1], "Job", "JobSet")
    job = made["spec"] if made["kind"] == "Job" else made["spec"]["replicatedJobs"][0]["template"]["spec"]
    preempted, refused = job["podFailurePolicy"]["rules"]
    assert (preempted["action"], preempted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [exit_codes.REFUSED])
    assert refused["onExitCodes"]["containerName"] in by_name(case[1])
    assert "failurePolicy" not in made["spec"], "a JobSet fails with the first of its Jobs"


def test_one_container_of_a_pod_asks_for_accelerators(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    for pod in pods(case[1]):
        asking = [one["name"] for one in containers(pod) if one["resources"]["limits"].keys() - {"cpu", "memory"}]
        assert asking in ([], ["trainer"], ["rollout"])


def test_every_pod_has_a_network_policy_and_every_service_a_pod(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    labels = [pod["metadata"]["labels"].items() for pod in pods(case[1])]
    chosen = [policy["spec"]["podSelector"]["matchLabels"].items() for policy in of_kind(case[1], "NetworkPolicy")]
    assert all(sum(selector <= own for selector in chosen) == 1 for own in labels)
    indices = dict.fromkeys(("jobset.sigs.k8s.io/job-index", "batch.kubernetes.io/job-completion-index"), "0").items()
    for service in of_kind(case[1], "Service"):
        assert sum(service["spec"]["selector"].items() <= (own | indices) for own in labels) == 1
    for budget in of_kind(case[1], "PodDisruptionBudget"):
        assert sum(budget["spec"]["selector"]["matchLabels"].items() <= own for own in labels) == 1


def test_no_claim_needs_to_be_mounted_twice(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    values, objects = case
    claims = of_kind(objects, "PersistentVolumeClaim")
    assert all(claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for claim in claims)
    made = [claim["spec"]["accessModes"] for claim in claims]
    made += [
        claim["spec"]["accessModes"]
        for one in of_kind(objects, "StatefulSet")
        for claim in one["spec"]["volumeClaimTemplates"]
    ]
    assert all(modes == ["ReadWriteOnce"] for modes in made)
    several = values["trainer"].get("hosts", 1) > 1
    assert (values["trainer"].get("storage", {}).get("kind") == "shared") == several


def test_only_trainer_and_rollout_servers_have_the_buckets_account(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    annotated = [
        one["metadata"]["name"] for one in of_kind(case[1], "ServiceAccount") if "annotations" in one["metadata"]
    ]
    assert annotated == (["run-volley-bucket"] if "bucketAccount" in case[0] else [])
    accounts = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["spec"] for pod in pods(case[1])}
    for component, spec in accounts.items():
        assert spec["serviceAccountName"].endswith("-bucket") == (component in ("trainer", "rollout"))


def test_probes_ask_the_routes_that_supervisors_may(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    found = by_name(case[1])
    for name, service in SERVICES.items():
        container = found[name]
        assert container["ports"] == [{"name": "http", "containerPort": service.port}]
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
        assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        started = container["startupProbe"]
        assert started["periodSeconds"] * started["failureThreshold"] >= service.start_s


def test_grace_outlasts_the_stop_of_a_service(case: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    for pod in pods(case[1]):
        assert pod["spec"]["terminationGracePeriodSeconds"] >= 25


def _layers(case: tuple[dict[str, Any], list[dict[str, Any]]], folder: Path) -> dict[str, str]:
    (found,) = (made for made in of_kind(case[1], "ConfigMap") if "run.yaml" in made["data"])
    for name, text in found["data"].items():
        (folder / name).write_text(text, encoding="utf-8")
    return found["data"]


def _load(command: Sequence[str], folder: Path) -> config.LoadedConfig:
    """Load the configuration that a command of a container names; its images hold this repository."""
    words = list(command)
    files = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
    overrides = words[words.index(files[-1]) + 1 :]
    paths = [folder / Path(name).name if name.startswith("/etc/volley/") else ROOT / name for name in files]
    return config.load(paths, overrides)


def test_services_accept_the_configuration_of_their_command(
    case: tuple[dict[str, Any], list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    _layers(case, tmp_path)
    found = by_name(case[1])
    addresses = {service["metadata"]["name"] for service in of_kind(case[1], "Service")}
    for name in ("env", "rollout", "orchestrator", "check"):
        services = _load(found[name]["command"], tmp_path).config.services
        for url in (services.env.url, services.orchestrator.url, services.trainer.url):
            assert url is not None
            assert url.split("//")[1].split(":")[0] in addresses
        assert services.rollout.url == ("http://10.1.2.3:8102" if name == "rollout" else None)


def test_numbers_of_the_configuration_arrive(rendered: dict[str, Any], tmp_path: Path) -> None:
    objects = rendered["values-multislice-spot"]["objects"]
    _layers(({}, objects), tmp_path)
    loaded = _load(by_name(objects)["check"]["command"], tmp_path)
    assert loaded.config.trainer.mesh.shape == (8, 4)
    assert loaded.config.services.trainer.num_processes == 8


def test_each_process_of_a_trainer_gets_its_number(
    rendered: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripts are run by a shell in which `python` and `volley` print their arguments."""
    objects = rendered["values-multislice-spot"]["objects"]
    _layers(({}, objects), tmp_path)
    found, numbers = by_name(objects), []
    for name in ("python", "volley"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        stub.chmod(0o755)
    for slice_ in range(2):
        for host in range(4):
            given = {"JOB_INDEX": slice_, "JOB_COMPLETION_INDEX": host, "POD_IP": f"10.0.{slice_}.{host}"}
            environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | {key: str(value) for key, value in given.items()}
            printed = subprocess.run(
                found["trainer"]["command"], env=environment, capture_output=True, encoding="utf-8", check=True
            ).stdout
            trainer = _load(shlex.split(printed), tmp_path).config.services.trainer
            numbers.append(trainer.process_id)
            first = slice_ == host == 0
            assert trainer.coordinator_address == ("10.0.0.0:8105" if first else "run-volley-trainer:8105")
            if first:
                followed = subprocess.run(
                    found["report"]["command"], env=environment, capture_output=True, encoding="utf-8", check=True
                ).stdout
                assert followed.startswith("volley follow --config")
    assert numbers == list(range(8))


@pytest.fixture(scope="module")
def odd() -> list[dict[str, Any]]:
    """Objects of odd values, of a release and a namespace that YAML reads as numbers."""
    answer = render({"odd": ODD}, (RELEASES[0], RELEASES[-1]), name="1e7", namespace="0777")["odd"]
    assert answer.get("faults") == [], answer
    return answer["objects"]


def test_odd_values_arrive_as_they_are(odd: list[dict[str, Any]], tmp_path: Path) -> None:
    assert {made["metadata"]["namespace"] for made in odd} == {"0777"}
    for pod in pods(odd):
        assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "1e7"
        assert isinstance(pod["metadata"]["annotations"].get("checksum/config", ""), str)
    found = by_name(odd)
    assert found["env"]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"add": ["SYS_RESOURCE"], "drop": ["ALL"]},
    }
    assert found["rollout"]["securityContext"]["readOnlyRootFilesystem"]
    (env,) = (one for one in of_kind(odd, "Deployment") if one["metadata"]["name"].endswith("-env"))
    assert env["spec"]["progressDeadlineSeconds"] > 10_000_000
    assert env["spec"]["template"]["metadata"]["annotations"]["note"] == ODD["env"]["podAnnotations"]["note"]
    (jobset,) = of_kind(odd, "JobSet")
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 10_000_000
    assert jobset["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "a: b, c"}
    (scaled,) = of_kind(odd, "ScaledObject")
    trigger = scaled["spec"]["triggers"][0]["metadata"]
    assert trigger == {"serverAddress": "https://p/#a", "query": 'sum(a{b="c\\n"})', "threshold": "1000000"}
    _layers((ODD, odd), tmp_path)
    loaded = _load(found["check"]["command"], tmp_path).config
    assert (loaded.run.name, loaded.run.bucket) == ("1e7", "s3://bucket/007")
    assert (loaded.trainer.max_steps, loaded.trainer.optimizer_config.learning_rate) == (10_000_000, 1e-6)
    assert ODD["config"]["data"]["env_config"].items() <= loaded.data.env_config.items()
    assert loaded.services.trainer.num_processes == 2000


def test_names_begin_with_a_letter_and_have_no_dots() -> None:
    starts = {"1e7": "volley-1e7", "a.b": "a-b-volley", "0.volley": "volley-0-volley", "a" * 53: "a" * 26}
    starts |= {"a" * 25 + "--b": "a" * 25}
    for release, start in starts.items():
        made = render({"": {}}, name=release)[""]["objects"]
        assert {one["metadata"]["name"] for one in of_kind(made, "Service")} == {
            f"{start}-{name}" for name in ("redis", "env", "orchestrator", "trainer")
        }


def test_all_containers_that_read_the_configuration_have_the_variables_it_may_name(odd: list[dict[str, Any]]) -> None:
    found = by_name(odd)
    for name in ("check", "trainer", "report"):
        assert [one for one in found[name]["env"] if one["name"] == "TOKEN"] == ODD["trainer"]["extraEnv"]
    assert found["redis"]["env"] == ODD["redis"]["extraEnv"]


def test_grace_follows_the_configuration(odd: list[dict[str, Any]]) -> None:
    for pod in pods(odd):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "redis":
            assert pod["spec"]["terminationGracePeriodSeconds"] >= 600 + boot.CLEANUP_S


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("redis://10.0.0.5:6380/1", {"port": 6380, "cidr": "10.0.0.5/32"}),
        ("rediss://10.0.0.5", {"port": 6379, "cidr": "10.0.0.5/32"}),
        ("rediss://redis.example.com:6380", {"port": 6380}),
        ("redis://[fd00::1]", {"port": 6379}),
    ],
)
def test_services_may_call_a_redis_elsewhere(url: str, rule: dict[str, Any]) -> None:
    values = {"redis": {"enabled": False, "url": url}, "networkPolicy": {"egress": []}}
    objects = render({"": values})[""]["objects"]
    asked: dict[str, Any] = {"ports": [{"port": rule["port"], "protocol": "TCP"}]}
    if "cidr" in rule:
        asked["to"] = [{"ipBlock": {"cidr": rule["cidr"]}}]
    allowed = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in of_kind(objects, "NetworkPolicy")
        if asked in one["spec"]["egress"]
    }
    assert allowed == {"rollout", "orchestrator", "trainer"}


def test_autoscaler_asks_for_a_metric_that_rollout_servers_have(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    from services.rollout.metrics import REGISTRY

    known = {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    for scaled in of_kind(case[1], "ScaledObject"):
        (deployment,) = (
            one
            for one in of_kind(case[1], "Deployment")
            if one["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
        )
        assert "replicas" not in deployment["spec"], "an upgrade of the release would reset it"
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        assert query.removeprefix("sum(").split("{")[0] in known | {"volley_rollout_engine_requests"}
        assert f'pod=~"{deployment["metadata"]["name"]}-' in query


def test_rules_and_dashboard_are_those_of_the_repository(rendered: dict[str, Any]) -> None:
    objects = rendered["values-tpu-v5e"]["objects"]
    folder = ROOT / "docker" / "observability"
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((folder / "alerts.yaml").read_text(encoding="utf-8"))
    (shown,) = (one for one in of_kind(objects, "ConfigMap") if "volley.json" in one["data"])
    assert json.loads(shown["data"]["volley.json"]) == json.loads((folder / "grafana.json").read_text(encoding="utf-8"))


@contextmanager
def cluster(secret: Mapping[str, str]) -> Iterator[str]:
    """API server of Kubernetes that holds one Secret of the release, and knows no other kind."""
    resources = [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get"]}]
    answers: dict[str, Any] = {
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources},
        "/api/v1/namespaces/team/secrets/run-volley-secrets": {"apiVersion": "v1", "kind": "Secret", "data": secret},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or {"kind": "Status", "status": "Failure", "code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_upgrade_keeps_the_secrets_of_the_cluster_and_adds_missing_ones() -> None:
    kept = {
        name: base64.b64encode(name.encode()).decode() for name in ("redis_password", "token_viewer", "token_admin")
    }
    with cluster(kept) as url:
        objects = render({"upgrade": {}}, apiserver=url)["upgrade"]["objects"]
    (secret,) = of_kind(objects, "Secret")
    new = secret["data"].pop("token_service")
    assert secret["data"] == kept
    assert len(base64.b64decode(new)) >= 32
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
