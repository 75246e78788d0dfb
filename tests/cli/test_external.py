"""`volley train` with services of others: what is wrong with them is said before anything is started, and the rest
starts around them.
"""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from services.env.app import open_service
from shared.config import load
from shared.errors import ConfigError, ServiceUnreachable, Unavailable
from shared.process.ports import free_port, hold
from shared.services_schema import Limits, ServicesSection, TokenFiles
from shared.web.http import create_app
from tests.support.asgi import served
from tests.support.tokens import write_private, write_tokens
from tools.chaos.arena import SIMULATED
from volley.local import external, ports, stack
from volley.local.processes import Reaper
from volley.local.stack import StackSeams
from volley.local.supervisor import RestartPolicy
from volley.printing import json_output
from volley.runs import addresses
from volley.runs.record import claimed
from volley_algorithms.teachers.client import TeacherAway
from volley_commands import status
from volley_launch.external import check as check_services

CONFIG = "configs/chaos.yaml"


def given(files: TokenFiles) -> list[str]:
    return [f"services.token_files.{role}={path}" for role, path in files.model_dump(mode="json").items()]


@asynccontextmanager
async def env(*overrides: str):
    async with open_service(load([CONFIG], overrides).config) as service, served(service.app) as url:
        yield url


async def check(*overrides: str) -> None:
    await check_services(load([CONFIG], overrides).config)


async def test_an_open_environment_service_is_taken():
    async with env() as url:
        await check(f"services.env.url={url}/")


async def test_servers_of_engines_must_answer():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnreachable, match=r"rollout\.engine\.url: GET "):
        await check("rollout.engine.kind=vllm", f"rollout.engine.url={url}")
    async with env() as answering:  # whatever answers is left to the rollout server
        await check("rollout.engine.kind=vllm", f"rollout.engine.url={answering}")


def test_each_rollout_server_needs_an_engine_of_its_own():
    one = load([CONFIG], ["rollout.engine.kind=vllm", "rollout.engine.url=http://127.0.0.1:1"]).config
    assert stack.engines_of(one, 1) == ("http://127.0.0.1:1",)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.url"):
        stack.engines_of(one, 2)


async def test_the_tokens_are_those_that_the_service_knows(tmp_path):
    files = write_tokens(tmp_path)
    async with env(*given(files)) as url:
        await check(f"services.env.url={url}", *given(files))
        with pytest.raises(ConfigError, match=r"asks for a token \(name the files .* services\.token_files"):
            await check(f"services.env.url={url}")
        wrong = files.model_copy(update={"service": write_private(tmp_path / "wrong", "0123456789abcdef")})
        with pytest.raises(ConfigError, match=r"refuses the token .*services\.token_files\.service must hold"):
            await check(f"services.env.url={url}", *given(wrong))


async def test_it_must_answer_be_ready_and_offer_the_environment_as_configured():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnreachable, match=r"services\.env\.url: GET .*start it, or remove services\.env\.url"):
        await check(f"services.env.url={address}")
    async with served(create_app("env", limits=Limits(), tokens=None, ready=lambda: None)) as url:
        with pytest.raises(ServiceUnreachable, match=r"services\.env\.url: GET .*services\.tls"):
            await check(f"services.env.url={url.replace('http:', 'https:')}")
    stuck = create_app("env", limits=Limits(), tokens=None, ready=lambda: "all threads hang")
    async with served(stuck) as url:
        with pytest.raises(Unavailable, match="is not ready: all threads hang"):
            await check(f"services.env.url={url}")
    async with env() as url:
        with pytest.raises(ConfigError, match=r"there is no environment 'chess'.*available: "):
            await check(f"services.env.url={url}", "data.env=chess")
        with pytest.raises(ConfigError, match=r"data\.env_config\.max_turns=3: .* serves frozen_lake with "):
            await check(f"services.env.url={url}", "data.env_config.max_turns=3")
        with pytest.raises(ConfigError, match=r"data\.mixture\.chess: .*there is no environment 'chess'"):
            await check(f"services.env.url={url}", "data.mixture.chess=1")
        with pytest.raises(ConfigError, match=r"data\.mixture\.sokoban\.env_config\.max_turns=3: .* serves sokoban"):
            await check(f"services.env.url={url}", "data.mixture.sokoban.env_config.max_turns=3")
        await check(f"services.env.url={url}", "data.mixture.sokoban=2")


async def test_a_rollout_server_must_answer_and_take_weights_from_us(tmp_path):
    from tests.support.engine import RolloutDouble

    async with served(RolloutDouble().app()) as url:
        await check(f"services.rollout_urls=[{url}]")
    with pytest.raises(ServiceUnreachable, match=r"services\.rollout_urls: "):
        await check(f"services.rollout_urls=[http://127.0.0.1:{free_port()}]")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("orchestrator", "`volley train` starts the orchestrator itself .*`volley follow`"),
        ("trainer", "`volley train` starts the trainer itself .*`volley follow`"),
        ("rollout", r"registers itself.*services\.rollout_urls"),
    ],
)
def test_what_cannot_be_external_says_so(key, named):
    with pytest.raises(ConfigError, match=named):
        external.find(ServicesSection.model_validate({key: {"url": "http://far:1"}}))


def test_ports_are_those_of_the_last_session_if_they_are_free():
    said = []
    free, taken = free_port(), free_port()
    with hold("127.0.0.1", taken) as other:
        other.listen()
        chosen = ports.choose(
            ServicesSection(), {}, {"env": 1, "rollout": 1}, {"env": free, "rollout-0": taken}, said.append
        )
    assert chosen["env"] == [free]
    assert chosen["rollout"] != [taken]
    assert said == [
        f"rollout-0 now listens on port {chosen['rollout'][0]}, because another program uses its previous port {taken}"
    ]


def test_the_ports_of_external_services_are_not_ours(tmp_path):
    from shared.run.folder import RunFolder

    folder = RunFolder(tmp_path)
    addresses.write(folder, {"trainer": "http://127.0.0.1:20001"}, {"env": "http://127.0.0.1:20002"}, ServicesSection())
    assert addresses.ports_before(folder) == {"trainer": 20001}
    folder.processes.write_bytes(
        b'{"urls": {"env": "http://x:99999999", "trainer": "nonsense"}, "token_files": {}, "ca_file": null}'
    )
    assert addresses.ports_before(folder) == {}


@pytest.mark.timeout(280)
async def test_a_run_starts_around_an_external_environment_and_resumes_at_the_same_addresses(tmp_path: Path, capsys):
    seen: list[dict[str, str]] = []
    async with env() as url:
        loaded = load(
            [CONFIG],
            [f"run.dir={tmp_path}", "run.name=around", f"services.env.url={url}", "services.rollout_replicas=1"],
        )
        for _session in range(2):
            with claimed(loaded) as claim, Reaper.running() as reaper:
                async with stack.running(
                    loaded, claim.folder, reaper, print, RestartPolicy(), StackSeams(SIMULATED)
                ) as running:
                    assert {one.name for one in running.kept} == {"redis", "orchestrator", "trainer", "rollout-0"}
                    seen.append(dict(running.urls))
                    async with running.client("trainer") as trainer:
                        start = (await trainer.get("/status"))["step"]
                        while (await trainer.get("/status"))["step"] < start + 2:
                            await asyncio.sleep(0.1)
                    with json_output():
                        await asyncio.to_thread(status.main, [str(claim.folder.path)])
    told = orjson.loads(capsys.readouterr().out.rpartition("\n{\n")[2].join(("{\n", "")))
    assert {s["name"]: s["external"] for s in told["services"]}["env"] is True
    assert seen[0] == seen[1]
    assert seen[0]["env"] == url


async def test_a_teacher_must_answer_where_somebody_is_to_ask_it():
    port = free_port()
    teacher = f"services.orchestrator.teacher.url=http://127.0.0.1:{port}"
    await check(teacher)
    with pytest.raises(TeacherAway, match=rf"the teacher \(http://127\.0\.0\.1:{port}\)"):
        await check(teacher, "algorithm.teacher_kl_coef=0.5")
    async with served(create_app("rollout", limits=Limits(), tokens=None, ready=lambda: None)) as url:
        await check(f"services.orchestrator.teacher.url={url}", "algorithm.teacher_kl_coef=0.5")
    own = "services.orchestrator.teacher={url: self, templates: ['{sibling}']}"
    await check(own, "algorithm.teacher_kl_coef=0.5")
