"""NeMo-Gym servers as environments: an imitation of one that is killed and answers nonsense, and the package's own."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import InputError, Unavailable
from shared.process.ports import free_port
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.net import wait_http
from tests.support.submitted import decided, opened, reached, timed_out
from tools.installed import python_with
from volley_sandbox.backends.remote.nemo_gym_rows import output_items, read_row, response
from volley_sandbox.submissions.canary import MAX_EPISODES
from volley_serving.dialects.calls import before_calls, tool_calls

INCREMENT = {"type": "function", "name": "increment", "parameters": {"properties": {"by": {"type": "integer"}}}}
CALL = '<tool_call>{"name": "increment", "arguments": {"by": %s}}</tool_call>'


def counter_row(number: int) -> dict[str, Any]:
    asked = {"input": [{"role": "user", "content": f"{number}: add {number % 7}."}], "tools": [INCREMENT]}
    return {"responses_create_params": asked, "initial_count": number, "expected_count": number + number % 7}


def word_row(number: int) -> dict[str, Any]:
    return {"responses_create_params": {"input": [], "instructions": "Repeat."}, "word": f"w{number}"}


def lines(row: Callable[[int], Mapping[str, Any]], first: int, n: int) -> str:
    return "\n".join(json.dumps(row(number)) for number in range(first, first + n))


COUNTER = {"train": lines(counter_row, 1, 40), "eval": lines(counter_row, 100, 10)}


@contextmanager
def serving(port: int, mode: str = "verify") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "packages.sandbox.tests.nemo_gym_server", str(port), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/openapi.json")
            yield process
        finally:
            process.kill()


@pytest.fixture
def nemo_gym() -> Iterator[Callable[..., str]]:
    """Starts an imitation; its address."""
    with ExitStack() as stack:

        def start(mode: str = "verify") -> str:
            stack.enter_context(serving(port := free_port(), mode))
            return f"http://127.0.0.1:{port}"

        yield start


async def submit(
    client: httpx.AsyncClient, url: str, tasks: Mapping[str, str] = COUNTER, **more: Any
) -> httpx.Response:
    weight = more.pop("weight", 0.0)
    body = {"name": "far", "url": url, "protocol": "nemo_gym", "tasks": tasks, "config": more, "weight": weight}
    return await client.post("/environments", json=body)


async def converse(
    client: httpx.AsyncClient, said: Sequence[str], index: int, env: str = "far"
) -> list[dict[str, Any]]:
    """The answers to each message of one episode."""
    made = await client.post("/episodes", json=opened(env, str(hash((index, *said))), index))
    assert made.status_code == 201, made.text
    path = f"/episodes/{made.json()['episode_id']}"
    steps = [{"request_id": str(n), "message": {"role": "assistant", "content": text}} for n, text in enumerate(said)]
    answers = [await client.post(f"{path}/step", json=step) for step in steps]
    await client.delete(path)
    assert all(answer.status_code == 200 for answer in answers), answers[-1].text
    return [made.json(), *(answer.json() for answer in answers)]


async def test_a_server_that_verifies_is_tried_played_and_kept(
    open_client: OpenClient, nemo_gym: Callable[..., str]
) -> None:
    async with open_client(limits=Limits()) as client:
        assert (await submit(client, nemo_gym(), weight=1.0, max_turns=4)).status_code == 202
        row = await decided(client, "far")
        assert (row["state"], row["splits"]) == ("canary", {"train": 40, "eval": 10}), row
        first, called, last = await converse(client, [f"So: {CALL % 3}", "Done."], index=2)
        assert first["messages"] == [{"role": "user", "content": "3: add 3."}]
        assert first["tools"][0]["function"]["name"] == "increment"
        assert called["messages"] == [{"role": "tool", "content": '{"count":6}'}]
        assert (called["reward"], called["terminated"]) == (0.0, False)
        assert (last["reward"], last["terminated"], last["info"]["success"]) == (1.0, True, True)
        assert last["info"]["verdict"] == {"n_items": 4}  # text, call, output, text
        wrong = await converse(
            client, ['<tool_call>{"name": "verify", "arguments": {}}</tool_call>', CALL % '"x"', "?"], 0
        )
        assert [answer["info"]["error"] for answer in wrong[1:]] == ["tool", "tool", None]
        assert "there is no tool 'verify'" in wrong[1]["messages"][0]["content"]
        assert "by: an integer" in wrong[2]["messages"][0]["content"]
        assert (wrong[3]["reward"], wrong[3]["info"]["success"]) == (0.0, False)
        late = await converse(client, [CALL % 1] * 4, index=3)
        assert [late[-1][key] for key in ("reward", "terminated", "truncated")] == [1.0, False, True]
        for n in range(MAX_EPISODES):  # few of them reach the later turns
            await converse(client, [""], index=n % 40)
        assert "fewer than 8 reached turn 2" in (await reached(client, "far", "active"))["why"]
    async with open_client(limits=Limits()) as client:  # the tasks were kept
        assert (await converse(client, [CALL % 2, "Done."], index=1))[-1]["reward"] == 1.0


async def test_a_server_that_steps_is_played(open_client: OpenClient, nemo_gym: Callable[..., str]) -> None:
    async with open_client(limits=Limits()) as client:
        tasks = {"train": lines(word_row, 0, 20), "eval": lines(word_row, 50, 5)}
        await submit(client, nemo_gym("step"), tasks, success="turn")
        assert (await decided(client, "far"))["state"] == "active"
        first, wrong, right = await converse(client, ["x", "<think>w5?</think>w4"], index=4)
        assert [message["content"] for message in first["messages"]] == ["Repeat.", "Say w4."]
        assert (wrong["messages"], wrong["reward"]) == ([{"role": "user", "content": "no"}], -0.25)
        assert (right["reward"], right["terminated"], right["info"]["success"]) == (1.0, True, True)
        assert (await converse(client, ["x"] * 3, index=1))[-1]["truncated"]


async def test_a_server_that_dies_or_is_started_again_loses_its_episodes_and_gives_them_no_reward(
    open_client: OpenClient,
) -> None:
    port = free_port()
    async with open_client(limits=Limits()) as client:
        with serving(port) as process:
            await submit(client, f"http://127.0.0.1:{port}")
            assert (await decided(client, "far"))["state"] == "active"
            paths = [
                f"/episodes/{(await client.post('/episodes', json=opened('far', str(n), n))).json()['episode_id']}/step"
                for n in range(2)
            ]
            process.kill()
            process.wait()
            said = {"request_id": "1", "message": {"role": "assistant", "content": "Done."}}
            dead = await client.post(paths[0], json=said)
            assert (dead.status_code, f"127.0.0.1:{port}" in dead.json()["detail"]) == (503, True), dead.text
        assert (await client.get("/environments")).json()["environments"][-1]["trouble"]
        with serving(port):
            lost = await client.post(paths[1], json=said)
            assert (lost.status_code, "it has restarted" in lost.json()["detail"]) == (503, True), lost.text
            assert (await converse(client, [CALL % 1, "Done."], index=0))[-1]["reward"] == 1.0
            assert (await client.get("/environments")).json()["environments"][-1]["trouble"] is None


@pytest.mark.parametrize(
    ("mode", "check", "detail"),
    [
        ("head", "reachable", "declares neither /seed_session and /verify nor /reset and /step"),
        ("nan", "episodes", "the server's reward a lot is not a finite number"),
        ("text", "episodes", "/verify is not valid JSON"),
        ("refuse", "episodes", "answered /verify with 422"),
    ],
)
async def test_a_server_that_cannot_be_played_is_rejected(
    open_client: OpenClient, nemo_gym: Callable[..., str], mode: str, check: str, detail: str
) -> None:
    async with open_client(limits=Limits()) as client:
        await submit(client, nemo_gym(mode))
        row = await decided(client, "far")
        failed = [one for one in row["report"]["checks"] if not one["ok"]]
        assert (row["state"], [one["name"] for one in failed]) == ("rejected", [check]), row
        assert detail in failed[0]["detail"], failed


async def test_a_server_that_never_gives_its_verdict_is_rejected(open_client: OpenClient) -> None:
    port = free_port()
    async with open_client(limits=Limits(), deadline_s=60.0) as client:
        with serving(port, "slow") as process:
            await submit(client, f"http://127.0.0.1:{port}")
            row = await timed_out(client, "far", process, "verify", 60.0)
    failed = [one for one in row["report"]["checks"] if not one["ok"]]
    assert (row["state"], [one["name"] for one in failed]) == ("rejected", ["episodes"]), row
    detail = failed[0]["detail"]
    assert "took longer than 60 s" in detail or "did not answer in time" in detail, failed


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"tasks": {}}, "tasks: there are none"),
        ({"tasks": {"train": "\n"}}, "tasks.train: there are no lines"),
        (
            {"tasks": {"train": '{"responses_create_params": {"input": "x"}}\n{"a": 1'}},
            "tasks.train: line 2: it is not",
        ),
        ({"tasks": {"train": '{"question": "x"}'}}, "line 1: it has no responses_create_params"),
        ({"tasks": {"../x": "{}"}}, "named by letters"),
        ({"tasks": {"train": ["x"]}}, "tasks.train"),
        ({"config": {"agent": "simple_agent"}}, "unknown field agent"),
        ({"protocol": "openenv"}, "the protocol openenv accepts none"),
        ({"tasks": {"train": "x" * (5 * 2**20)}}, "the limit is"),
    ],
)
async def test_what_cannot_be_played_is_refused(open_client: OpenClient, change: dict[str, Any], detail: str) -> None:
    async with open_client(limits=Limits()) as client:
        body = {"name": "far", "url": "http://127.0.0.1:1", "protocol": "nemo_gym", "tasks": COUNTER, **change}
        refused = await client.post("/environments", json=body)
        assert refused.status_code in (413, 422), refused.text
        assert detail in refused.text


def test_items_of_the_responses_api_become_messages() -> None:
    image = {"type": "input_image", "image_url": "data:…"}
    given: list[Any] = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."}],
        },
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    row = read_row(json.dumps({"responses_create_params": {"input": given}}).encode())
    assert [(message["role"], message["content"]) for message in row.opening] == [
        ("system", "Be brief."),
        ("assistant", ""),
        ("tool", "3"),
    ]
    given.append({"role": "user", "content": [image]})
    with pytest.raises(InputError, match="is not text"):
        read_row(json.dumps({"responses_create_params": {"input": given}}).encode())


UPSTREAM = """
import json, sys
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.responses_converter import ResponsesConverter
rows = []
for said, response in json.load(sys.stdin):
    ours = NeMoGymResponse.model_validate(response).model_dump(mode="json")["output"]
    converter = ResponsesConverter(return_token_id_information=False)
    theirs = [item.model_dump(mode="json") for item in converter.postprocess_assistant_message_dict(said)]
    rows.append([ours, theirs])
print(json.dumps(rows))
"""
SERVE = """
import importlib, sys
import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf

name, port = sys.argv[1], int(sys.argv[2])
module = importlib.import_module(f"resources_servers.{name}.app")
kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, SimpleResourcesServer)]
kind = next(one for one in kinds if one.__module__ == module.__name__)
config = kind.model_fields["config"].annotation(
    host="127.0.0.1", port=port, entrypoint="app.py", name=name, domain="agent")
head = BaseServerConfig(host="127.0.0.1", port=1)
client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
server = kind(config=config, server_client=client)
app = server.setup_webserver()
server.setup_exception_middleware(app)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
"""
"""What `run_webserver` of the package does, without Ray and a head server."""


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python that has NeMo-Gym's package."""
    try:
        return python_with("nemo-gym==0.4.0", "VOLLEY_NEMO_GYM_PYTHON", "setuptools<81")
    except Unavailable as error:
        pytest.skip(str(error))


@contextmanager
def upstream(python: Path, name: str) -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([str(python), "-c", SERVE, name, str(port)], cwd=python.parents[1]) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/openapi.json", 240)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def example(python: Path, name: str) -> list[str]:
    """The rows that the package brings for a server."""
    found = next(python.parents[1].glob(f"lib/python3*/site-packages/resources_servers/{name}/data/example.jsonl"))
    return found.read_text(encoding="utf-8").splitlines()


def increments(*counts: int) -> list[str]:
    return [f'<tool_call>{{"name": "increment_counter", "arguments": {{"count": {n}}}}}</tool_call>' for n in counts]


@pytest.mark.long
async def test_the_packages_own_counter_says_the_same_to_us_and_to_its_own_requests(
    open_client: OpenClient, python: Path
) -> None:
    rows = example(python, "example_session_state_mgmt")
    with upstream(python, "example_session_state_mgmt") as url:
        async with open_client(limits=Limits()) as client, httpx.AsyncClient(base_url=url, trust_env=False) as own:
            await submit(client, url, {"train": "\n".join(rows[:4]), "eval": rows[4]})
            row = await decided(client, "far")
            assert (row["state"], row["protocol"]) == ("active", "nemo_gym"), row
            for index, counts in ((0, (1, 2)), (0, (1, 1)), (2, (7, 8)), (3, ())):
                ours = await converse(client, [*increments(*counts), "That is it."], index)
                own.cookies.clear()
                given = json.loads(rows[index])
                await own.post("/seed_session", json=given)
                for count in counts:
                    await own.post("/increment_counter", json={"count": count})
                answer = {**given, "response": response(read_row(rows[index].encode()), output_items("Yes.", [], []))}
                theirs = await own.post("/verify", json=answer)
                assert theirs.status_code == 200, theirs.text
                assert ours[-1]["reward"] == theirs.json()["reward"]
                assert (ours[-1]["terminated"], ours[-1]["reward"]) == (True, float(counts in ((1, 2), (7, 8))))
            await asyncio.sleep(32)  # longer than its server keeps a connection that was used
            assert (await converse(client, [*increments(4, 5), "Yes."], 1))[-1]["reward"] == 1.0


@pytest.mark.long
async def test_the_packages_own_blackjack_is_played_to_its_end(open_client: OpenClient, python: Path) -> None:
    with upstream(python, "blackjack") as url:
        async with open_client(limits=Limits()) as client:
            await submit(client, url, {"train": "\n".join(example(python, "blackjack"))})
            assert (await decided(client, "far"))["state"] == "active"
            for index in range(5):
                first, *answers = await converse(client, ["<action>stand</action>"], index)
                assert "Your hand: [" in first["messages"][-1]["content"]
                told = answers[-1]["info"]["step_info"]
                assert answers[-1]["reward"] == {"win": 1.0, "draw": 0.0, "loss": -1.0}[told["result"]]
                assert answers[-1]["info"]["success"] == (told["result"] == "win")


def test_thoughts_that_nobody_closes_take_the_time_of_their_length() -> None:
    items = output_items("<think>a</think>" + "<think>" * 2**17, [], [])
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[0]["summary"] == [{"type": "summary_text", "text": "a"}]
    assert items[1]["content"][0]["text"] == "<think>" * 2**17


@pytest.mark.long
def test_responses_are_the_packages_own(python: Path) -> None:
    row, found = read_row(json.dumps(counter_row(1)).encode()), []
    for text in ("Five.", "<think>a</think>b", "", f"Now {CALL % 3}", f"<think>x</think>{CALL % 1}{CALL % 2}"):
        calls = tool_calls({"role": "assistant", "content": text}, schemas=row.tools)
        ids = [f"c{n}" for n in range(len(calls))]
        spoken = before_calls(text) if calls else text
        functions = [
            {"name": call.name, "arguments": json.dumps(call.arguments, separators=(",", ":"))} for call in calls
        ]
        said: dict[str, Any] = {"role": "assistant", "content": spoken}
        if calls:
            pairs = zip(ids, functions, strict=True)
            said["tool_calls"] = [{"id": one, "type": "function", "function": function} for one, function in pairs]
        found.append([said, response(row, output_items(spoken, calls, ids))])
    done = subprocess.run(
        [str(python), "-c", UPSTREAM],
        input=json.dumps(found),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    for ours, theirs in json.loads(done.stdout.splitlines()[-1]):
        for items in (ours, theirs):
            for item in items:
                if item["type"] != "function_call":
                    item.pop("id")
        assert ours == theirs
