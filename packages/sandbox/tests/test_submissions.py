"""Submitted environments over HTTP: their life, their versions, what outlives the service, what is refused."""

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.env.catalogue import Catalogue
from services.env.settings import ConfiguredSource
from services.env.threads import ThreadRunner
from shared.errors import ConfigError, Forbidden, Unavailable
from shared.run.sources import FoundSource
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import ADDER, FAILS_LIVE, PYTHON, decided, opened, play, reached, submit
from volley_sandbox.backends.remote.site import open_access
from volley_sandbox.harbor.containers import Containers, HarborSettings
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.canary import MIN_EPISODES
from volley_sandbox.submissions.offers import Offers
from volley_sandbox.submissions.programs import AgentPrograms
from volley_sandbox.submissions.record import SubmittedVersion, Transition
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import MAX_SOURCE, Submission
from volley_sandbox.submissions.submissions import Submissions


async def test_a_file_is_validated_and_played(open_client: OpenClient) -> None:
    async with open_client() as client:
        answer = await submit(client, ADDER, name="adder")
        assert (answer.status_code, answer.json()["name"], answer.json()["state"]) == (202, "adder@1", "submitted")
        row = await decided(client, "adder")
        assert row["state"] == "active", row
        assert row["splits"] == {"train": 1000, "eval": 50}
        assert [line["state"] for line in row["history"]] == ["submitted", "validating", "active"]
        assert [check["name"] for check in row["report"]["checks"] if not check["ok"]] == []
        shown = (await client.post("/adder/demonstration", json={"split": "train", "index": 7})).json()
        answer = await play(client, "adder", "1", shown["messages"][-1]["content"], index=7)
        assert (answer.json()["reward"], answer.json()["terminated"]) == (1.0, True)
        assert (await play(client, "adder@1", "2", "no")).json()["reward"] == 0.0
        listed = (await client.get("/environments")).json()["environments"][-1]
        assert (listed["name"], listed["state"], listed["version"]) == ("adder@1", "active", 1)


async def test_a_file_of_windows_is_validated(open_client: OpenClient) -> None:
    async with open_client() as client:
        file = ("\ufeff" + ADDER).replace("\n", "\r\n").encode()
        answer = await client.post("/environments?name=adder", content=file, headers=PYTHON)
        assert answer.status_code == 202, answer.text
        row = await decided(client, "adder")
        assert row["state"] == "active", row


HALVES = r"""
class Half:
    splits = {"train": 40, "eval": 8}
    def reset(self, split, index, seed):
        self.n = 2 * index + (split == "eval")
        return f"{self.n} Left \ud83d"
    tools = [{"type": "function", "function": {"name": "f", "description": "\ud83d", "parameters": {}}}]
    def step(self, text):
        print("\ud83d")
        return "done \ud83d", 1.0, True, False, {"success": True, "raw": "cut \ud83d", "\udc00": ["\ud83d\ude00"]}
"""


async def test_halves_of_surrogate_pairs_are_replaced(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, HALVES, name="half")
        row = await decided(client, "half")
        assert row["state"] == "active", row["report"]["checks"]
        made = await client.post("/episodes", json={"request_id": "0", "env": "half", "split": "train", "index": 1})
        assert made.json()["messages"][0]["content"] == "2 Left \ufffd", made.text
        stepped = (await play(client, "half", "1", "x \ufffd")).json()
        assert stepped["messages"][0]["content"] == "done \ufffd"
        assert (stepped["info"]["raw"], stepped["info"]["\ufffd"]) == ("cut \ufffd", ["\U0001f600"])


async def test_a_canary_is_promoted_by_episodes_that_go_well(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="adder", weight=1)
        assert (await decided(client, "adder"))["state"] == "canary"
        for i in range(MIN_EPISODES):
            assert (await play(client, "adder@1", str(i), "no")).status_code == 200
        row = await reached(client, "adder", "active")
        assert f"{MIN_EPISODES} live episodes, 0 failed" in row["why"]


async def test_an_episode_that_its_client_ends_counts_as_one_that_went_well(open_client: OpenClient) -> None:
    """A run's own bound of turns ends episodes that would go on: the service sees them deleted, and never over."""
    endless = ADDER.replace("float(right), True, False", "float(right), False, False").replace(
        'return "", ', 'return "?", '
    )
    endless = endless.partition("    def demonstration")[0]
    async with open_client() as client:
        await submit(client, endless, name="adder", weight=1)
        assert (await decided(client, "adder"))["state"] == "canary"
        for i in range(MIN_EPISODES):
            answer = await play(client, "adder@1", str(i), "no")
            assert answer.json()["terminated"] is False
            made = (await client.post("/episodes", json=opened("adder@1", str(i)))).json()
            await client.delete(f"/episodes/{made['episode_id']}")
        assert f"{MIN_EPISODES} live episodes, 0 failed" in (await reached(client, "adder", "active"))["why"]


async def test_a_canary_that_fails_is_rejected_and_the_version_before_goes_on(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="adder", weight=1)
        await decided(client, "adder")
        assert (await client.post("/environments/adder/activate")).json()["state"] == "active"
        second = await client.put(
            "/environments/adder", params={"weight": 1}, content=FAILS_LIVE.encode(), headers=PYTHON
        )
        assert (second.status_code, second.json()["name"]) == (202, "adder@2")
        assert (await decided(client, "adder"))["state"] == "canary"
        for i in range(2):
            answer = await play(client, "adder@2", str(i), "live")
            assert (answer.status_code, "KeyError" in answer.json()["detail"]) == (500, True)
        row = await reached(client, "adder", "rejected")
        assert "at turn 1, 2 of the 2 attempts that reached it failed" in row["why"]
        assert "KeyError" in (await client.get("/environments/adder/logs")).json()["log"]
        assert (await play(client, "adder", "more", "no")).status_code == 200
        assert (await client.post("/adder@2/num_tasks", json={"split": "train"})).status_code == 404


LATE = """
class Late:
    splits = {"train": 1000, "eval": 50}

    def reset(self, split, index, seed):
        self.turn = 0
        return f"{split} {index}"

    def step(self, text):
        self.turn += 1
        if text == "slow":
            import time
            time.sleep(30)
        if self.turn == 3 and text == "right":
            raise KeyError("lost")
        over = text != "right"
        return "go on", 0.5, over, False, {"success": False}
"""
"""Wrong answers end it well; its third turn raises, which only right answers reach."""


async def turns(client: httpx.AsyncClient, env: str, number: str, *replies: str) -> int:
    """The status of the last step of an episode."""
    made = (await client.post("/episodes", json=opened(env, number))).json()
    answer = None
    for i, reply in enumerate(replies):
        body = {"request_id": str(i), "message": {"role": "assistant", "content": reply}}
        answer = await client.post(f"/episodes/{made['episode_id']}/step", json=body)
    await client.delete(f"/episodes/{made['episode_id']}")
    assert answer is not None
    return answer.status_code


RIGHT = ("right",) * 3


async def test_a_version_that_fails_after_its_promotion_is_rolled_back_once(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="late", weight=1)
        await decided(client, "late")
        await client.post("/environments/late/activate")
        await client.put("/environments/late", params={"weight": 1}, content=LATE.encode(), headers=PYTHON)
        assert (await decided(client, "late"))["state"] == "canary"
        for i in range(MIN_EPISODES):
            assert await turns(client, "late@2", f"wrong {i}", "wrong") == 200
        assert "8 live episodes, 0 failed" in (await reached(client, "late", "active"))["why"]
        assert (await client.get("/environments/late@1")).json()["versions"][0]["state"] == "retired"
        for i in range(3):
            assert await turns(client, "late@2", f"right {i}", *RIGHT) == 500
        row = await reached(client, "late", "retired")
        assert row["why"].startswith("rolled back to late@1: at turn 3, 3 of the 3 attempts that reached it failed")
        assert row["failures"] == [{"turn": 3, "reached": 3, "failed": 3}]
        (first,) = (await client.get("/environments/late@1")).json()["versions"]
        assert (first["state"], "late@2 was rolled back: at turn 3" in first["why"]) == ("active", True)
        assert (await client.post("/environments/late@2/activate")).status_code == 200
        for i in range(4):
            assert await turns(client, "late@2", f"again {i}", *RIGHT) == 500
        await asyncio.sleep(1.2)
        listed = {row["name"]: row for row in (await client.get("/environments")).json()["environments"]}
        assert listed["late@2"]["state"] == "active", "a person's choice is not undone"
        assert "at turn 3, 7 of the 7 attempts" in listed["late@2"]["trouble"]


async def test_an_episode_that_is_played_again_and_fails_again_counts_once(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, LATE, name="late", weight=1)
        await decided(client, "late")
        for i in range(3):
            body = {**opened("late@1", f"again {i}"), "seed": 7}
            made = (await client.post("/episodes", json=body)).json()
            for k in range(3):
                step = {"request_id": str(k), "message": {"role": "assistant", "content": "right"}}
                answer = await client.post(f"/episodes/{made['episode_id']}/step", json=step)
            assert answer.status_code == 500
        (row,) = (await client.get("/environments/late")).json()["versions"]
        assert (row["state"], row["failures"]) == ("canary", [{"turn": 3, "reached": 1, "failed": 1}])


async def test_an_environment_that_hangs_is_named(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, LATE, name="late", weight=1)
        await decided(client, "late")
        hanging = asyncio.ensure_future(turns(client, "late@1", "hangs", "slow"))
        async with asyncio.timeout(25):
            while True:
                rows = (await client.get("/environments")).json()["environments"]
                if (told := next(row["trouble"] for row in rows if row["name"] == "late@1")) is not None:
                    break
                await asyncio.sleep(0.2)
        assert told.startswith("unanswered calls: 1, the oldest for ")
        hanging.cancel()


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"sum": 3}'}}
TELLS = """
class Tells:
    splits = {"train": 20, "eval": 5}

    def reset(self, split, index, seed):
        return f"{split} {index}"

    def step(self, text):
        return "you said " + text, 0.0, False, False, {}
"""


async def stepped(client: httpx.AsyncClient, env: str, content: str | None, number: str = "1") -> httpx.Response:
    made = (await client.post("/episodes", json=opened(env, f"{env} {number}"))).json()
    message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    answer = await client.post(f"/episodes/{made['episode_id']}/step", json={"request_id": "1", "message": message})
    if answer.status_code == 422:
        plain = {"request_id": "2", "message": {"role": "assistant", "content": "plain"}}
        assert (await client.post(f"/episodes/{made['episode_id']}/step", json=plain)).status_code == 200
    return answer


async def test_tool_calls_reach_an_environment_with_tools_and_are_refused_by_others(open_client: OpenClient) -> None:
    tools = "    tools = [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]\n"
    named = TELLS.replace("class Tells:\n", "class Tells:\n" + tools)
    async with open_client() as client:
        for name, source in (("one", TELLS), ("two", named)):
            await submit(client, source, name=name)
            assert (await decided(client, name))["state"] == "active"
        refused = await stepped(client, "one", None)
        assert (refused.status_code, "has no tools to call" in refused.json()["detail"]) == (422, True)
        for content, before in ((None, ""), ("Well.", "Well.\n")):
            answer = await stepped(client, "two", content, f"with {content}")
            said = answer.json()["messages"][0]["content"]
            assert said == f'you said {before}<tool_call>{{"name":"add","arguments":{{"sum":3}}}}</tool_call>'


async def test_a_service_without_room_for_more_sandboxes_blames_no_environment(open_client: OpenClient) -> None:
    async with open_client(max_sandboxes=2) as client:
        await submit(client, ADDER, name="adder", weight=1)
        assert (await decided(client, "adder"))["state"] == "canary"
        held = [(await client.post("/episodes", json=opened("adder@1", f"held {i}"))).json() for i in range(2)]
        for i in range(3):
            refused = await client.post("/episodes", json=opened("adder@1", f"refused {i}"))
            assert (refused.status_code, "2 sandboxes run already" in refused.json()["detail"]) == (429, True)
        for episode in held:
            await client.delete(f"/episodes/{episode['episode_id']}")
        for i in range(MIN_EPISODES):
            assert (await play(client, "adder@1", str(i), "no")).status_code == 200
        assert f"{MIN_EPISODES} live episodes, 0 failed" in (await reached(client, "adder", "active"))["why"]


async def test_how_episodes_failed_outlives_the_service(open_client: OpenClient, tmp_path: Path) -> None:
    kept = tmp_path / "environments/submitted/adder/1/failures.log"
    async with open_client() as client:
        await submit(client, FAILS_LIVE, name="adder")
        await decided(client, "adder")
        assert (await play(client, "adder", "1", "live")).status_code == 500
        async with asyncio.timeout(30):
            while not kept.exists():
                await asyncio.sleep(0.05)
    async with open_client() as client:
        log = (await client.get("/environments/adder/logs")).json()["log"]
        assert ("UTC an episode failed: " in log, "KeyError" in log, log.count("\n")) == (True, True, 0)


async def test_versions_at_rest_are_listed_by_name_alone(open_client: OpenClient) -> None:
    """Whoever follows GET /environments is told what is in use, not everything that ever was."""
    async with open_client() as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        for number in (2, 3):
            await client.put("/environments/adder", content=f"{ADDER}#{number}".encode(), headers=PYTHON)
            assert (await decided(client, f"adder@{number}"))["state"] == "active"
        assert await states(client) == {"adder@2": "retired", "adder@3": "active"}
        versions = (await client.get("/environments/adder")).json()["versions"]
        assert [row["state"] for row in versions] == ["retired", "retired", "active"]
        names = [row["name"] for row in (await client.get("/environments")).json()["environments"]]
        assert {"adder", "adder@1"} & {*names} == set()


async def test_a_new_version_takes_the_place_and_can_be_rolled_back(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        better = ADDER.replace("float(right)", "2.0 * right")
        await client.put("/environments/adder", content=better.encode(), headers=PYTHON)
        assert (await decided(client, "adder@2"))["state"] == "active"
        assert await states(client) == {"adder@1": "retired", "adder@2": "active"}
        assert (await client.post("/environments/adder@1/activate")).status_code == 200
        assert await states(client) == {"adder@1": "active", "adder@2": "retired"}
        assert (await play(client, "adder@2", "still", "no")).status_code == 200
        assert (await client.post("/environments/adder/retire")).json()["name"] == "adder@1"
        assert (await client.post("/adder/num_tasks", json={"split": "train"})).status_code == 404


async def test_what_was_submitted_outlives_the_service(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        await submit(client, ADDER, name="canary", weight=1)
        await decided(client, "canary")
        variant = {"name": "lake6", "base": "frozen_lake", "config": {"size": 6, "max_actions": 20}}
        assert (await client.post("/environments", json=variant)).status_code == 201
        await submit(client, ADDER, name="late")
        before = await states(client)
    async with open_client() as client:
        assert (await decided(client, "late"))["state"] == "active"
        assert await states(client) == {**before, "late@1": "active"}
        assert (await play(client, "adder", "1", "no")).status_code == 200
        assert (await client.post("/lake6/num_tasks", json={"split": "eval"})).status_code == 200


async def test_a_damaged_record_costs_that_version_alone(open_client: OpenClient, tmp_path: Path) -> None:
    async with open_client() as client:
        for name in ("one", "two"):
            await submit(client, ADDER, name=name)
            await decided(client, name)
    (tmp_path / "environments/submitted/one/1/record.json").write_text("{", encoding="utf-8")
    async with open_client() as client:
        assert await states(client) == {"two@1": "active"}
        assert (await submit(client, ADDER, name="one")).json()["name"] == "one@2"


async def test_of_two_versions_that_a_crash_left_active_the_later_is_in_use(
    open_client: OpenClient, tmp_path: Path
) -> None:
    async with open_client() as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        first = tmp_path / "environments/submitted/adder/1/record.json"
        before = first.read_text(encoding="utf-8")
        await client.put("/environments/adder", content=(ADDER + "#").encode(), headers=PYTHON)
        await decided(client, "adder@2")
    first.write_text(before, encoding="utf-8")
    for _ in range(2):
        async with open_client() as client:
            assert await states(client) == {"adder@1": "retired", "adder@2": "active"}


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    rows = (await client.get("/environments")).json()["environments"]
    return {row["name"]: row["state"] for row in rows if row["base"] == "python"}


async def test_the_same_submission_again_changes_nothing(open_client: OpenClient) -> None:
    async with open_client() as client:
        for _ in range(2):
            assert (await submit(client, ADDER, name="adder")).json()["name"] == "adder@1"
        await decided(client, "adder")
        assert (await submit(client, ADDER, name="adder")).json()["state"] == "active"
        again = await client.put("/environments/adder", content=ADDER.encode(), headers=PYTHON)
        assert again.json()["name"] == "adder@1"


@pytest.mark.parametrize(
    ("query", "source", "status", "detail"),
    [
        ({}, ADDER, 422, "name is missing"),
        ({"name": "a b"}, ADDER, 422, "name"),
        ({"name": "../a"}, ADDER, 422, "name"),
        ({"name": "adder@3"}, ADDER, 422, "versions are numbered by the service"),
        ({"name": "splits"}, ADDER, 422, "the service's own paths"),
        ({"name": "frozen_lake"}, ADDER, 409, "the name of another environment"),
        ({"name": "a", "weight": "-1"}, ADDER, 422, "weight"),
        ({"name": "a", "weight": "nan"}, ADDER, 422, "weight"),
        ({"name": "a", "entry": "not a name"}, ADDER, 422, "entry"),
        ({"name": "a", "colour": "red"}, ADDER, 422, "unknown field colour"),
        ({"name": "a"}, " \n", 422, "the source is empty"),
        ({"name": "a"}, "#" * (MAX_SOURCE + 1), 413, "bytes"),
    ],
)
async def test_bad_submissions_are_refused(
    open_client: OpenClient, query: dict[str, Any], source: str, status: int, detail: str
) -> None:
    async with open_client(limits=Limits()) as client:
        answer = await submit(client, source, **query)
        assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text
        assert await states(client) == {}


async def test_what_is_not_there_or_not_now_is_told(open_client: OpenClient) -> None:
    cases: list[tuple[str, str, Any, int, str]] = [
        ("GET", "/environments/nobody", None, 404, "was submitted"),
        ("GET", "/environments/nobody/logs", None, 404, "was submitted"),
        ("POST", "/environments/nobody/retire", None, 404, "was submitted"),
        ("GET", "/environments/adder@9", None, 404, "adder@9"),
        ("GET", "/environments/adder@x", None, 404, "adder@x"),
        ("PUT", "/environments/nobody", {"source": "x"}, 404, "was submitted"),
        ("PUT", "/environments/adder", {"source": "x", "name": "other"}, 422, "differs from the path's name"),
        ("POST", "/environments", {"name": "adder", "source": "x = 1"}, 409, "adder@1 is active"),
        ("POST", "/environments", {"name": "new"}, 422, "source is missing"),
        ("POST", "/environments/adder/activate", None, 409, "it cannot become active"),
        ("POST", "/environments", {"name": "v", "base": "adder"}, 422, "submitted environment"),
    ]
    async with open_client() as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        for method, path, body, status, detail in cases:
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("source", "check", "detail"),
    [
        ("class A:\n  def reset(", "loads", "SyntaxError"),
        ("import no_such_module\n" + ADDER, "loads", "no_such_module"),
        ("x = 1\n", "loads", "class"),
        (ADDER.replace('"train": 1000, ', ""), "splits", "train"),
        (ADDER.replace("1000", "0"), "loads", "0"),
        (ADDER.replace("float(right)", 'float("nan")'), "episodes", "reward"),
        (ADDER.replace('""', "7"), "episodes", "observation"),
        (ADDER.replace('f"{split}/{index}"', "None"), "determinism", "reset again with the same seed"),
        (ADDER.replace('f"{split}/{index}"', "index % 3"), "disjoint splits", "begins exactly like train/"),
        (ADDER.replace("str(self.a + self.b)}]", '"7"}]'), "demonstrations", "gives the opposite"),
        ("import os\nos._exit(3)\n" + ADDER, "loads", "ended"),
    ],
)
async def test_what_would_not_work_is_rejected_with_a_reason(
    open_client: OpenClient, source: str, check: str, detail: str
) -> None:
    async with open_client() as client:
        await submit(client, source, name="bad")
        row = await decided(client, "bad")
        assert row["state"] == "rejected"
        failed = [one for one in row["report"]["checks"] if not one["ok"]]
        assert [one["name"] for one in failed] == [check]
        assert detail in failed[0]["detail"], failed
        assert row["why"].startswith(f"{check}: ")


async def test_settings_are_bounded(open_client: OpenClient) -> None:
    """They are kept and shown with every version, and whoever reads the list takes so much and no more."""
    async with open_client(limits=Limits()) as client:
        for config, detail in (({"a": "x" * 20_000}, "the limit is 16384"), ({"a": [0] * 300}, "256 values")):
            body = {"name": "a", "source": ADDER, "config": config}
            answer = await client.post("/environments", json=body)
            assert (400 <= answer.status_code < 500, detail in answer.json()["detail"]) == (True, True), answer.text


class NoIndex(AgentPrograms):
    """Its package index never answers."""

    async def of(self, version: SubmittedVersion) -> EnvironmentProgram:
        raise Unavailable(f"the package index of {version.name} cannot be reached")


def submissions_of(
    store: SubmissionStore, runner: ThreadRunner, sandboxes: Sandboxes, programs: AgentPrograms, **changes: Any
) -> Submissions:
    catalogue, remotes = Catalogue(runner), open_access(None, None, 5.0)
    offers = Offers(store, catalogue, sandboxes, remotes, programs, SandboxLimits(), 5.0)
    return Submissions(store, catalogue, sandboxes, programs, offers, **changes)


async def test_patience_with_what_cannot_be_validated_begins_with_the_process(tmp_path: Path) -> None:
    """One that was submitted long ago, and is taken up by a service that starts again, is not rejected at once."""
    store, runner = SubmissionStore(tmp_path / "submitted"), ThreadRunner(1, 5.0, max_waiting=1)
    programs = NoIndex(store, tmp_path, "http://127.0.0.1:9/simple", Containers(HarborSettings()))
    long_ago = (Transition(state="submitted", at=0), Transition(state="validating", at=1))
    store.add(SubmittedVersion(name="adder", version=1, digest="0" * 64, size=1, history=long_ago), {})
    clock = [601.0, 599.0, 0.0]
    async with Sandboxes() as sandboxes, asyncio.TaskGroup() as workers:
        timing: dict[str, Any] = {"retry_s": 0.01, "patience_s": 600.0, "clock": clock.pop}
        submissions = submissions_of(store, runner, sandboxes, programs, **timing)
        await submissions.open()
        worker = workers.create_task(submissions.validate_waiting())
        async with asyncio.timeout(60):
            while (row := submissions.versions("adder")[0]).state == "validating":
                await asyncio.sleep(0.05)
        worker.cancel()
    assert (row.state, clock) == ("rejected", [])
    assert row.why.startswith("it could not be validated: the package index of adder")


async def test_where_nothing_is_confined_only_what_is_named_is_taken(tmp_path: Path) -> None:
    store, runner = SubmissionStore(tmp_path / "submitted"), ThreadRunner(1, 5.0, max_waiting=1)
    programs = AgentPrograms(store, tmp_path, "http://127.0.0.1:9/simple", Containers(HarborSettings()))
    async with Sandboxes(namespaces=False, landlock=0) as sandboxes:
        submissions = submissions_of(store, runner, sandboxes, programs, unsandboxed=["known"])
        with pytest.raises(Forbidden, match="this machine cannot confine submitted code"):
            await submissions.submit(Submission("adder", ADDER.encode()))
        assert (await submissions.submit(Submission("known", ADDER.encode()))).state == "submitted"


async def test_a_file_of_the_configuration_is_there_when_the_service_is(
    open_client: OpenClient, tmp_path: Path
) -> None:
    """It is kept as it was: later starts need the file no more; without what was kept, another file is refused."""
    file = tmp_path / "mine.py"
    file.write_text(ADDER, encoding="utf-8")
    source = ConfiguredSource(FoundSource(file, None), hashlib.sha256(ADDER.encode()).hexdigest(), {})
    settings: dict[str, Any] = {"env": "mine-1@1", "sources": {"mine-1@1": source}}
    async with open_client(**settings) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await play(client, "mine-1@1", "1", "no")).json()["reward"] == 0.0
    file.write_text(ADDER + "#", encoding="utf-8")
    async with open_client(**settings) as client:
        assert (await client.get("/environments/mine-1")).json()["versions"][0]["state"] == "active"
    shutil.rmtree(tmp_path / "environments")
    with pytest.raises(ConfigError, match="has changed since the run's configuration was made"):
        async with open_client(**settings):
            pass


async def test_a_file_of_the_configuration_that_does_not_work_ends_the_service(
    open_client: OpenClient, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module\n", encoding="utf-8")
    source = ConfiguredSource(FoundSource(file, None), hashlib.sha256(file.read_bytes()).hexdigest(), {})
    for _ in range(2):
        with pytest.raises(ConfigError, match="no_such_module"):
            async with open_client(env="mine-1@1", sources={"mine-1@1": source}):
                pass
