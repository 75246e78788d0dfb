"""Task folders of Harbor: submitted by REST, proved by their solutions, played in a shell, judged by their tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.env.backends import harbor
from services.env.backends.harbor import read_config
from services.env.sandbox.sandboxes import Sandboxes
from services.env.submissions import validation
from shared.errors import Forbidden, InputError
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.env.harbor_tasks import TASK_TOML, Conversation, begin, call, dockerfile, submit, sum_task, toml, zipped
from tests.env.submitted import decided

SOLVE = "echo $(( $(paste -sd+ data/numbers.txt) )) > total.txt"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def why_not() -> str:
    """Why sandboxes cannot start programs here; empty if they can."""
    async with Sandboxes() as sandboxes:
        try:
            await sandboxes.probe_shell()
        except Forbidden as error:
            return error.detail
    return ""


@pytest_asyncio.fixture
async def client(open_client: OpenClient, why_not: str) -> AsyncIterator[httpx.AsyncClient]:
    if why_not:
        pytest.skip(why_not)
    async with open_client(limits=Limits()) as opened:
        yield opened


async def taken(client: httpx.AsyncClient, *folders: tuple[str, Mapping[str, str]]) -> Mapping[str, Any]:
    """The version after its validation."""
    answer = await submit(client, zipped(*folders))
    assert answer.status_code == 202, answer.text
    return await decided(client, "adder")


async def playing(client: httpx.AsyncClient, **changes: str) -> Conversation:
    """An episode of a task that was taken."""
    row = await taken(client, ("", sum_task(**changes)))
    assert row["state"] == "active", (row["why"], row["report"])
    return await begin(client)


async def test_a_dataset_of_task_folders_is_proved_and_played(client: httpx.AsyncClient) -> None:
    folders = [("set/train/a", sum_task(1)), ("set/train/b", sum_task(2)), ("set/eval/c", sum_task(3))]
    row = await taken(client, *folders)
    assert (row["state"], row["splits"], row["protocol"]) == ("active", {"train": 2, "eval": 1}, "harbor"), row
    checks = {check["name"]: check for check in row["report"]["checks"]}
    assert "3 solutions give 1" in checks["solutions"]["detail"]
    assert all(check["ok"] for check in checks.values())
    one = await begin(client, index=1)
    assert one.opening == [{"role": "user", "content": sum_task(2)["instruction.md"]}]
    assert [tool["function"]["name"] for tool in one.tools] == ["bash"]
    assert (await one.run("cat data/numbers.txt; echo $UNIT; pwd")).split() == ["2", "9", "22", "metre", "/app"]
    assert await one.run("false") == "(no output)\n[exit code 1]"
    assert await one.run(SOLVE) == "(no output)"
    last = await one.say("Done.")
    assert (last["reward"], last["terminated"], last["info"]["success"]) == (1.0, True, True), last
    idle = await begin(client, split="eval")
    assert (await idle.say("I cannot."))["reward"] == 0.0


async def test_a_restarted_service_plays_what_was_taken(client: httpx.AsyncClient, open_client: OpenClient) -> None:
    await playing(client)
    async with open_client(limits=Limits()) as again:
        one = await begin(again)
        await one.run(SOLVE)
        assert (await one.say("Done."))["reward"] == 1.0


async def test_what_judges_is_not_there_before(client: httpx.AsyncClient) -> None:
    one = await playing(client)
    listed = await one.run("ls /tests /solution /logs/verifier; find / -name check.sh -o -name solve.sh 2>/dev/null")
    assert "check.sh" not in listed
    assert "solve.sh" not in listed
    assert listed.count("No such file") == 2


TAMPERS = {
    "leaves a process": "(while :; do echo 1 > /logs/verifier/reward.txt; done) & nohup sleep 60 & echo",
    "writes the verdict": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
    "puts tests in place": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "leads tests away": "mkdir /app/mine; ln -s /app/mine /tests; touch /app/mine/test.sh",
    "leads the verdict away": "rm -rf /logs; ln -s /app /logs; mkdir verifier; echo 1 > verifier/reward.txt",
    "changes programs": "rm -rf /bin /usr /etc; mv /usr /u; ln -sf /bin/true /bin/bash; echo",
    "makes files that cannot be": "rm -rf /logs; echo 1 > /logs",
    "fills the disk": "head -c 1G /dev/zero > big; for i in $(seq 2000); do : > f$i 2> /dev/null || break; done",
    "closes what is its own": "chmod 000 /app /logs /logs/verifier; echo",
    "comes with Python": "d=~/.local/lib/python3.$(python3 -c 'import sys; print(sys.version_info[1])')/site-packages;"
    "mkdir -p $d; echo 'import os; os._exit(0)' | tee $d/usercustomize.py > $d/sitecustomize.py",
    "plants links of a link": "mkdir -p /mine /logs; echo '{\"reward\": 1}' > /mine/reward.json; rm -rf /logs/verifier;"
    "ln -s /mine /logs/verifier; for i in $(seq 0 9); do ln -P /logs/verifier /.removed-$i; done",
    "plants links that turn over": "mkdir -p /y /z/verifier; echo '{\"reward\": 1}' > /z/verifier/reward.json;"
    "ln -s /z /y/verifier; for i in $(seq 0 9); do ln -s /y /.removed-$i; done; rm -rf /logs; ln -s /.removed-1 /logs",
    "plants modules": "mkdir /mine; ln -s /mine /tests; for i in $(seq 0 9); do ln -P /tests /.removed-$i; done;"
    "for m in sys re os io; do echo 'import os; os._exit(0)' > /mine/$m.py; done",
    "plants a user's folder": "v=$(python3 -c 'import sys; print(sys.version_info[1])');"
    "d=.local/lib/python3.$v/site-packages;"
    "for h in /root /verifier; do mkdir -p $h/$d; echo 'import os; os._exit(0)' > $h/$d/x.pth; done",
    "gives itself a login": "for h in /root /verifier; do mkdir -p $h; echo 'exit 0' | tee $h/.bashrc $h/.profile > "
    "$h/.bash_profile; done",
    "gives itself another program": "mkdir /app/bin; for p in bash python3; do ln -s /bin/true /app/bin/$p; done",
    "gives itself another shell": "echo 'exit 0' > ~/.bashrc; echo 'exit 0' > /app/.profile; export BASH_ENV=/app/x",
}


TAMPERED = """
python3 /tests/check.py && bash -l -c 'python3 /tests/check.py' && env -i python3 /tests/check.py \
    && env -i bash -l -c 'python3 /tests/check.py'
"""
CHECK_PY = "import re, sys; sys.exit(open('total.txt').read() != '30\\n')"


async def test_nothing_the_model_does_makes_tests_give_more(client: httpx.AsyncClient) -> None:
    small = {"task.toml": TASK_TOML.replace("memory_mb", "storage_mb = 8\nmemory_mb")}
    small |= {"tests/check.sh": TAMPERED, "tests/check.py": CHECK_PY}
    small["environment/Dockerfile"] = f"{sum_task()['environment/Dockerfile']}ENV PATH=/app/bin:/usr/bin:/bin\n"
    row = await taken(client, ("", sum_task(**small)))
    assert row["state"] == "active", row
    for name, command in TAMPERS.items():
        one = await begin(client)
        await one.run(command)
        last = await one.say("Done.")
        assert (last["reward"], last["terminated"]) == (0.0, True), (name, last)
        await one.close()


def _forged(tests: str, command: str, **changes: str) -> tuple[dict[str, str], str]:
    """A task whose tests are one line, and what a model might do in place of solving it."""
    return {"tests/check.sh": f"{tests}\n", "tests/expected.txt": "30\n", "tests/out/a": "30\n", **changes}, command


def _with(line: str) -> dict[str, str]:
    return {"environment/Dockerfile": f"FROM debian\n{line}\nWORKDIR /app\nCOPY numbers.txt data/\n"}


READ = "cmp -s total.txt /tests/expected.txt"
TOLD = """
for i in $(seq 200); do echo test $i of many; done > /logs/verifier/log; {} >> /logs/verifier/log || echo FAILED \
    >> /logs/verifier/log; ! grep -q FAILED /logs/verifier/log
"""
FILLED = "cat /dev/zero > fill; truncate -s -{} fill"
FORGED = {
    "modules by a variable": _forged(
        "python3 /tests/check.py",
        "echo 'import os; os._exit(0)' > sitecustomize.py",
        **{"tests/check.py": CHECK_PY, **_with("ENV PYTHONPATH=/app")},
    ),
    "a shell's file by a variable": _forged(f"bash -c '{READ}'", "echo 'exit 0' > x", **_with("ENV BASH_ENV=/app/x")),
    "a link to the answer": _forged(READ, "ln -s /tests/expected.txt total.txt"),
    "a link to what is not there yet": _forged(READ, "ln -s ../verifier/../tests/./expected.txt total.txt"),
    "a folder's link": _forged(
        "diff -r out /tests/out",
        "ln -s /tests/out out",
        **{"solution/solve.sh": "mkdir out; echo 30 > out/a"},
    ),
    "the root's link": _forged(
        "cmp total/tests/expected.txt /tests/expected.txt",
        "ln -s / total",
        **{"solution/solve.sh": "mkdir -p total/tests; echo 30 > total/tests/expected.txt"},
    ),
    "the reader's own folder": _forged(
        f"cd /tests; {READ.replace('total', '/app/total')}",
        "touch expected.txt; ln -s /proc/self/cwd/expected.txt total.txt",
    ),
    "the reader's arguments": _forged("grep -q 30 total.txt", "ln -s /proc/self/cmdline total.txt"),
    "a working folder that leads away": _forged("grep -qx 30 expected.txt || " + READ, "mv /app /a; ln -s /tests /app"),
    "a working folder that is gone": _forged(READ, "rm -r /app; echo 30 > /total.txt"),
    "a temporary file": _forged(
        f"{READ} && echo good > /tmp/told || echo bad > /tmp/told; grep -q good /tmp/told",
        "echo good > /tmp/told; chmod 444 /tmp/told",
    ),
    "a link to temporary files": _forged(
        "cp /tests/expected.txt /tmp/a; diff -r out /tests/out && [ -d out ]",
        "ln -s /tmp out",
        **{"solution/solve.sh": "mkdir out; echo 30 > out/a"},
    ),
    "a link to a folder of the system's": _forged(
        "cp /tests/expected.txt /root/a; diff -r out /tests/out && [ -d out ]",
        "ln -s /root out",
        **{"solution/solve.sh": "mkdir out; echo 30 > out/a"},
    ),
    "what was moved away": _forged(
        f"cd /tests; {READ.replace('total.txt', '$(find / -name wanted 2>/dev/null | tail -n 1)')}",
        "mkdir /else; echo 30 > /else/wanted",
        **{"solution/solve.sh": "echo 30 > wanted"},
    ),
    "a file beside the tests": _forged(f"[ -e /.settings ] && . /.settings; {READ}", "echo exit > /.settings"),
    "a disk that is full": _forged(TOLD.format(READ), FILLED.format("4k")),
    "a disk without files": _forged(
        TOLD.format(READ), "mkdir many; cd many; for i in $(seq 9999); do : > $i || exit; done"
    ),
}


async def test_nothing_that_tests_find_beside_the_work_is_the_models(client: httpx.AsyncClient) -> None:
    """Each task is proved, by the validation, to give 0 where nothing was done and 1 when it is solved."""
    small = {"task.toml": TASK_TOML.replace("memory_mb", "storage_mb = 8\nmemory_mb")}
    folders = [(f"set/{number:02}", sum_task(1, **small, **task)) for number, (task, _) in enumerate(FORGED.values())]
    row = await taken(client, *folders)
    checks = {check["name"]: check["detail"] for check in row["report"]["checks"]}
    assert row["state"] == "active", (row["why"], row["report"])
    assert f"{len(FORGED)} solutions give 1, and idle episodes less" in checks["solutions"]
    got: dict[str, float] = {}
    for number, (name, (_, command)) in enumerate(FORGED.items()):
        one = await begin(client, index=number)
        await one.run(command)
        got[name] = (await one.say("Done."))["reward"]
        await one.close()
    assert got == dict.fromkeys(FORGED, 0.0)


async def test_the_work_is_what_the_model_left(client: httpx.AsyncClient) -> None:
    """In the working folder and in the folders of the Dockerfile, links among them and into the system included."""
    check = (
        '[ "$(cat total.txt)" = 30 ] && [ "$(cat /data/sub/deep)" = 1 ] && [ -d /out ] && [ -L /out/sh ]'
        ' && [ "$(stat -c %a /data/sub)" = 500 ] && [ -x /out/run ] && [ "$RULE" = yes ] && [ -z "$UNIT" ]'
        ' && [ "$(cat hard)" = 2 ] && [ -L told ] && [ -s told ] && [ -L who ]\n'
    )
    solution = (
        "mkdir /data/sub; echo 1 > /data/sub/deep; echo 30 > /out/x; ln -s ../out/x total.txt; ln -s /bin/sh /out/sh\n"
        "ln -s link /out/run; ln -s ../bin/../usr/bin/env /out/link; ln -s deep /data/sub/l; chmod 500 /data/sub\n"
        "echo 2 > /tmp/n; ln /tmp/n hard; ln /out/x /root/x; ln -s /tmp/sub/numbers.txt told; ln -s /etc/passwd who\n"
    )
    docker = (
        "FROM debian\nENV UNIT=metre\nWORKDIR /out\nWORKDIR /app\nCOPY numbers.txt /data/\nCOPY numbers.txt /tmp/sub/\n"
    )
    files = {"tests/check.sh": check, "solution/solve.sh": solution, "environment/Dockerfile": docker}
    files |= toml("verifier", 'env = {RULE = "yes"}')
    one = await playing(client, **files)
    await one.run(solution)
    assert (await one.say("Done."))["reward"] == 1.0


async def test_the_last_turn_is_judged_and_truncated(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's time is over with its first command."""
    one = await playing(client)
    clock = count(0, 100)
    monkeypatch.setattr(harbor, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    last = await one.say(call(SOLVE))
    assert (last["reward"], last["truncated"], last["terminated"]) == (1.0, True, False), last
    assert last["messages"] == [{"role": "tool", "content": "(no output)"}]


async def test_an_episode_that_its_client_ends_is_judged(client: httpx.AsyncClient) -> None:
    one = await playing(client)
    await one.run(SOLVE)
    last = await one.finish()
    assert (last["reward"], last["truncated"], last["info"]["success"]) == (1.0, True, True), last


async def test_limits_of_commands_and_tests(client: httpx.AsyncClient) -> None:
    hungry = "python3 -c 'x = b\"a\" * (60 << 20); import time; time.sleep(60)'"
    check = f"[ -e hungry ] && {{ {hungry} & {hungry} & wait; }}; [ -e total.txt ]\n"
    one = await playing(client, **{"task.toml": TASK_TOML.replace("256", "96"), "tests/check.sh": check})
    assert "more memory than there is" in await one.run(f"{hungry} & {hungry} & wait")
    await one.run("touch hungry")
    last = await one.say("Done.")
    told = "the tests were killed: its processes together needed more memory than there is"
    assert (last["reward"], last["info"]["verifier"]) == (0.0, told)


WRITTEN = [
    ('{"reward": 0.25, "style": 3}', 0.25, None),
    ('{"score": 0.5}', 0.5, None),
    ('{"reward": true}', 1.0, None),
    ('{"reward": 0.5, "\\ud800": 0}', 0.5, None),
    ('{"a": 1, "b": 1}', 0.0, "none named reward"),
    ('{"reward": "1"}', 0.0, "values that are not finite numbers"),
    ('{"reward": NaN}', 0.0, "values that are not finite numbers"),
    ("{", 0.0, "not JSON"),
]


async def test_rewards_of_reward_json(client: httpx.AsyncClient) -> None:
    check = f"[ -e told ] && cp told /logs/verifier/reward.json\n{sum_task()['tests/check.sh']}"
    row = await taken(client, ("", sum_task(**{"tests/check.sh": check})))
    assert row["state"] == "active", row
    for written, reward, why in WRITTEN:
        one = await begin(client)
        await one.run(f"cat > told <<'END'\n{written}\nEND")
        last = await one.say("Done.")
        assert last["reward"] == reward
        assert (why or "") in last["info"].get("verifier", ""), last
        assert (why is None) == ("verifier" not in last["info"])


REJECTED = {
    "solves nothing": ({"solution/solve.sh": "#!/bin/bash\ntrue\n"}, "the tests give 0 after solution/solve.sh"),
    "needs a program": ({"solution/solve.sh": "no-such-program > total.txt\n"}, "the tests give 0 after"),
    "is solved before": ({"tests/check.sh": "true\n"}, "give 1 after an idle episode"),
    "judges nothing": ({"tests/test.sh": "#!/bin/bash\ntrue\n"}, "wrote neither reward.txt nor reward.json"),
    "gives no number": ({"tests/test.sh": "echo good > /logs/verifier/reward.txt"}, "not finite numbers"),
}


async def test_a_step_may_take_as_long_as_its_programs(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_CALL_S", 0.0)
    row = await taken(client, ("", sum_task()))
    assert row["state"] == "active", row["why"]


async def test_a_validation_tries_what_there_is_time_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validation.DEADLINE_S + validation.proofs_s() <= 600
    monkeypatch.setattr(validation, "PROVE_S", 0.0)
    row = await taken(client, *((f"set/{number}", sum_task(number)) for number in range(1, 6)))
    assert row["state"] == "active", row
    assert any("of 5 tasks were tried" in told for told in row["report"]["warnings"]), row


async def test_a_task_whose_tests_do_not_tell_is_rejected(client: httpx.AsyncClient) -> None:
    for number, (changes, why) in enumerate(REJECTED.values()):
        name = f"task-{number}"
        assert (await submit(client, zipped(("", sum_task(**changes))), name)).status_code == 202
        row = await decided(client, name)
        assert (row["state"], why in row["why"]) == ("rejected", True), row["why"]


async def test_refusals_are_answered(client: httpx.AsyncClient) -> None:
    answer = await submit(client, zipped(("mine", sum_task(**dockerfile("RUN make")))))
    assert (answer.status_code, "the task mine: environment/Dockerfile, line 2: RUN" in answer.text) == (422, True)
    only_held_out = await submit(client, zipped(("eval/a", sum_task()), ("eval/b", sum_task(2))))
    assert (only_held_out.status_code, "there are none to train on" in only_held_out.text) == (422, True)


def test_settings_are_checked() -> None:
    assert read_config({"max_turns": 3}).max_turns == 3
    with pytest.raises(InputError, match="turns"):
        read_config({"turns": 3})
