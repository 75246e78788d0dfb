"""The tools themselves: what they keep, where their bounds are, and what a model reads when it is wrong."""

import asyncio
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from packages.sandbox.tests.tools.conftest import OpenTools, ask
from shared.errors import Busy, Conflict, RateLimited, SandboxLost
from shared.process import telemetry
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.base import ToolDescription, ToolFault
from volley_sandbox.tools.calculator import CalculatorSession
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.python import PythonSession
from volley_sandbox.tools.settings import PythonSettings, ToolUse
from volley_sandbox.tools.toolset import Toolbox
from volley_sandbox.tools.workspace import Workspace
from volley_serving.dialects.calls import ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_python_keeps_variables_and_shows_the_last_value(open_tools: OpenTools) -> None:
    tools = await open_tools("python")
    assert await ask(tools, "python", code="x = 20\nprint('set')") == "set"
    assert await ask(tools, "python", code="def f(n):\n    return x + n\nprint('a')\nf(1)") == "a\n21"
    assert await ask(tools, "python", code="x = 1") == "(no output)"
    told = await ask(tools, "python", code="y = 1\nf('a')")
    assert "TypeError: unsupported operand" in told
    assert "line 2, in <module>: f('a')" in told


async def test_python_is_the_same_under_a_seed(open_tools: OpenTools) -> None:
    code = "import random\nprint(random.random(), set('abcdef'), hash('a'))"
    first, again, other = [await ask(await open_tools("python", seed=seed), "python", code=code) for seed in (7, 7, 8)]
    assert first == again != other


async def test_python_that_uses_up_its_time_keeps_its_variables_if_it_can_be_interrupted(open_tools: OpenTools) -> None:
    tools = await open_tools({"python": {"cpu_s": 0.2}}, timeout_s=20)
    await ask(tools, "python", code="x = 5")
    assert "used its 0.2 s of CPU time" in await ask(tools, "python", code="x = 6\nwhile True: pass")
    assert await ask(tools, "python", code="x") == "6"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os\nos._exit(3)", "exit code 3"),
        ("import os\nos.write(3, b'x' * 100)", "the interpreter was restarted"),
    ],
)
async def test_python_that_ends_its_interpreter_gets_another(open_tools: OpenTools, code: str, told: str) -> None:
    tools = await open_tools("python", {"workspace": {"files": {"a.txt": "kept"}}})
    assert told in await ask(tools, "python", code=code)
    assert "NameError" in await ask(tools, "python", code="x")
    assert await ask(tools, "python", code="open('a.txt').read()") == "'kept'"


@pytest.mark.parametrize("share", [1.0, 0.1])
async def test_python_that_is_too_late_gets_another_interpreter(toolbox: Toolbox, share: float) -> None:
    """It is told so, unless the machine gave it too little time: then the episode gives no reward."""
    session = PythonSession(PythonSettings(), toolbox.sandboxes, 0, share_now=lambda: share)
    sleeping = {"code": "x = 1\nimport time\ntime.sleep(60)"}
    try:
        with pytest.raises(ToolFault if share == 1 else SandboxLost):
            await session.call("python", sleeping, 0.5)
        with pytest.raises(ToolFault, match="NameError"):
            await session.call("python", {"code": "x"}, 20)
    finally:
        await session.close()


async def test_python_and_the_workspace_have_the_same_files(open_tools: OpenTools) -> None:
    tools = await open_tools("python", {"workspace": {"files": {"in/a.txt": "1\n2\n"}, "max_kb": 4, "max_files": 3}})
    code = "import os\nprint(open('in/a.txt').read())\nos.mkdir('out')\nopen('out/b', 'w').write('two')"
    code += "\nos.remove('in/a.txt')"
    assert await ask(tools, "python", code=code) == "1\n2"
    assert await ask(tools, "list_files") == "out/b (3 bytes)"
    await ask(tools, "edit_file", path="out/b", old="two", new="three")
    assert await ask(tools, "python", code="open('out/b').read()") == "'three'"
    await ask(tools, "delete_file", path="out/b")
    assert await ask(tools, "python", code="os.listdir('out')") == "[]"
    assert "'big' is too large to be kept" in await ask(tools, "python", code="open('big', 'w').write('x' * 5000);")
    told = await ask(tools, "python", code="for n in range(9): open(f'f{n}', 'w').write('x')")
    assert "'f3' is not kept in the workspace: there are 3 files already" in told
    assert "and 3 files more" in told
    link = "os.symlink('/etc/passwd', 'link')\nos.symlink('/etc', 'folder')"
    assert await ask(tools, "python", code=link) == "(no output)"
    assert "link" not in await ask(tools, "list_files")


async def test_files_outlive_an_answer_that_is_too_long_and_another_working_folder(open_tools: OpenTools) -> None:
    tools = await open_tools("python", "workspace")
    loud = "import os, sys\nfor out in (sys.stdout, sys.stderr): out.write(chr(1) * 200_000)\nopen('a', 'w').write('1')"
    await ask(tools, "write_file", path="a", content="0")
    assert "error: " in await ask(tools, "python", code=loud)
    assert await ask(tools, "python", code="os.mkdir('in'); os.chdir('in')") == "(no output)"
    assert await ask(tools, "list_files") == "a (1 bytes)"
    await ask(tools, "write_file", path="in/b", content="2")
    assert await ask(tools, "python", code="open('b').read()") == "'2'"
    await ask(tools, "write_file", path="c", content="3")
    assert await ask(tools, "read_file", path="a") == "1"
    assert await ask(tools, "python", code="open('../c').read()") == "'3'"
    assert await ask(tools, "python", code="os.mkdir('../d')") == "(no output)"
    await ask(tools, "write_file", path="d", content="4")
    assert "cannot be put in its place" in await ask(tools, "python", code="1")
    await ask(tools, "write_file", path="e", content="5")
    assert "cannot be put in its place" in await ask(tools, "python", code="1")
    await ask(tools, "delete_file", path="d")
    assert await ask(tools, "python", code="open('../e').read()") == "'5'"


BAD_PATHS = ["", "/etc/passwd", "../x", "a/../../x", "a\\b", ".", "a\x00b", "a" * 300, "/".join("a" * 20)]


async def test_the_workspace_has_no_way_out(open_tools: OpenTools) -> None:
    tools = await open_tools({"workspace": {"files": {"a": "text"}}})
    for path in BAD_PATHS:
        assert "error: " in await ask(tools, "read_file", path=path)
        assert "error: " in await ask(tools, "write_file", path=path, content="x")
    assert "a part of the path a/b is a file" in await ask(tools, "write_file", path="a/b", content="x")
    assert await ask(tools, "write_file", path="./c//d.txt", content="x") == "wrote 1 bytes to c/d.txt"
    assert "c is a folder" in await ask(tools, "write_file", path="c", content="x")
    assert "there is no file b (there are: a, c/d.txt)" in await ask(tools, "read_file", path="b")
    assert "must occur once" in await ask(tools, "edit_file", path="a", old="t", new="x")
    assert "the files would have" in await ask(tools, "write_file", path="e", content="x" * 300_000)
    assert await ask(tools, "read_file", path="a") == "text"


async def test_lines_of_a_file(open_tools: OpenTools) -> None:
    tools = await open_tools({"workspace": {"files": {"a": "1\n2\n3\n", "empty": ""}}})
    assert await ask(tools, "read_file", path="a", first_line=2, n_lines=1) == "2\n"
    assert await ask(tools, "read_file", path="empty") == "the file is empty"
    assert "the file has 3 lines" in await ask(tools, "read_file", path="a", first_line=4)


async def test_a_workspace_is_bounded_whoever_writes() -> None:
    workspace = Workspace(max_files=1, max_bytes=10)
    workspace.write("a", b"1234567890")
    assert workspace.write("a", b"0987654321") == "a"
    assert workspace.changed == {"a"}


MANY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c"
SCRIPT = "CREATE TABLE t(a, b); INSERT INTO t VALUES (1, 'x'), (2, NULL)"


async def test_sql_that_only_reads(open_tools: OpenTools, tmp_path: Path) -> None:
    tools = await open_tools({"sql": {"script": SCRIPT, "max_rows": 1}})
    assert await ask(tools, "sql", query="SELECT * FROM t") == "a | b\n1 | x\n(the first 1 rows)"
    assert "not authorized" in await ask(tools, "sql", query="DELETE FROM t")
    file = tmp_path / "d.sqlite"
    with sqlite3.connect(file) as made:
        made.executescript(SCRIPT)
    tools = await open_tools({"sql": {"database": file}})
    assert await ask(tools, "sql", query="SELECT count(*) FROM t") == "count(*)\n2\n(1 row)"
    tools = await open_tools("sql", database=json.dumps({"schema": SCRIPT}))
    assert await ask(tools, "sql", query="SELECT max(a) FROM t") == "max(a)\n2\n(1 row)"


async def test_sql_that_writes_is_each_episodes_own(open_tools: OpenTools) -> None:
    one, other = [await open_tools({"sql": {"script": SCRIPT, "writable": True}}) for _ in range(2)]
    assert await ask(one, "sql", query="DELETE FROM t WHERE a = 1; SELECT a FROM t;") == "1 rows changed\na\n2\n(1 row)"
    assert "no such table: u" in await ask(one, "sql", query="DELETE FROM t; SELECT * FROM u")
    assert await ask(one, "sql", query="SELECT count(*) FROM t") == "count(*)\n0\n(1 row)"
    assert await ask(other, "sql", query="SELECT count(*) FROM t") == "count(*)\n2\n(1 row)"


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (f"{MANY}) SELECT count(*) FROM c", "too many steps"),
        ("ATTACH '/etc/passwd' AS p", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("PRAGMA max_page_count = 1000000", "not authorized"),
        (f"CREATE TABLE u AS {MANY} LIMIT 9999) SELECT zeroblob(999) FROM c", "full"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("VACUUM INTO '/tmp/x'", "authorization denied"),
        ("", "done"),
    ],
)  # fmt: skip
async def test_hostile_sql(open_tools: OpenTools, query: str, told: str) -> None:
    tools = await open_tools({"sql": {"script": SCRIPT, "writable": True}})
    assert told in await ask(tools, "sql", query=query)
    assert await ask(tools, "sql", query="SELECT count(*) FROM t") == "count(*)\n2\n(1 row)"


async def test_calls_are_answered_in_their_order_with_their_errors(open_tools: OpenTools) -> None:
    tools = await open_tools("calculator", "python", max_calls_per_turn=4, max_calls=5)
    calls = [
        ToolCall("python", {"code": "import time; time.sleep(0.1); x = 1"}),
        ToolCall("calculator", {"expression": "1/4"}),
        ToolCall("calculator", {"term": "1", "b": 2}),
        ToolCall("python", {"code": "x"}),
    ]
    answers = await tools.answer([*calls, *[ToolCall("calculator", {"expression": "1"})] * 996])
    assert [answer.text for answer in answers] == [
        "(no output)",
        "0.25",
        "error: the argument expression is missing; there is no argument term (there are: expression); "
        "there is no argument b (there are: expression)",
        "1",
        "error: 996 tool calls were not carried out: at most 4 are taken from one message",
    ]
    names = await tools.answer([ToolCall("nothing", {}), ToolCall(problem="it is torn")])
    assert names[0].text == "error: there is no tool 'nothing' (there are: calculator, python)"
    assert "none is left: answer without" in names[1].text
    assert (tools.n_calls, tools.n_faults) == (5, 2)


async def test_lanes_run_at_once_up_to_the_bound(open_tools: OpenTools) -> None:
    tools = await open_tools("python", "sql", "calculator", parallel=1)
    calls = [ToolCall("calculator", {"expression": str(n)}) for n in range(8)]
    assert [answer.text for answer in await tools.answer(calls)] == [str(n) for n in range(8)]


async def test_long_answers_lose_their_middle_and_say_so(open_tools: OpenTools) -> None:
    tools = await open_tools("python", max_output=300)
    text = await ask(tools, "python", code="print('a' * 5000, 'b' * 5000, end='')")
    assert "[… 9701 of 10001 characters left out …]" in text
    assert text.startswith("a" * 200)
    assert text.endswith("b" * 100)
    assert "only the first 131072 characters" in await ask(tools, "python", code="print('x' * 10**6)")
    assert await ask(tools, "python", code=r"print('\ud800')") == "\ufffd"


async def test_a_given_up_call_leaves_nothing_behind(open_tools: OpenTools) -> None:
    tools = await open_tools("python")
    work = asyncio.ensure_future(tools.answer([ToolCall("python", {"code": "import time; time.sleep(60)"})]))
    await asyncio.sleep(0.3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await ask(tools, "python", code="1") == "1"


class Crowded:
    """A tool that has no room for its first calls."""

    tools = (ToolDescription("crowded", "", {"type": "object", "properties": {}}),)
    lane = None

    def __init__(self, n_refused: int) -> None:
        self.left = n_refused

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        self.left -= 1
        if self.left >= 0:
            raise Busy("there is no room")
        return "done"

    async def close(self) -> None:
        """There is nothing to free."""


async def test_a_message_is_repeated_only_if_none_of_its_calls_has_begun() -> None:
    tools = EpisodeTools([Crowded(1), CalculatorSession()], ToolUse(max_calls=2, parallel=1))
    crowded, sum_ = ToolCall("crowded", {}), ToolCall("calculator", {"expression": "1+1"})
    with pytest.raises(Busy):
        await tools.answer([crowded, sum_])
    assert [answer.text for answer in await tools.answer([crowded, sum_])] == ["done", "2"]
    tools = EpisodeTools([Crowded(1), CalculatorSession()], ToolUse(parallel=1))
    with pytest.raises(RateLimited, match="after other calls of the message had begun") as raised:
        await tools.answer([sum_, crowded])
    assert not isinstance(raised.value, Busy)


async def test_no_room_for_a_sandbox_is_no_failure_of_the_episode() -> None:
    async with Sandboxes(max_running=0) as full:
        session = PythonSession(PythonSettings(), full, 0)
        with pytest.raises(Busy, match="run already"):
            await session.call("python", {"code": "1"}, 5.0)


async def test_an_episode_that_is_deleted_during_its_calls_leaves_no_sandbox(
    open_tools: OpenTools,
) -> None:
    before = telemetry.REGISTRY.get_sample_value("volley_env_sandboxes")
    tools = await open_tools("python")
    assert await ask(tools, "python", code="1") == "1"
    calls = [ToolCall("python", {"code": "import time; time.sleep(60)"}), ToolCall("python", {"code": "1"})]
    work = asyncio.ensure_future(tools.answer(calls))
    await asyncio.sleep(0.1)
    starting = await open_tools("python")
    first = asyncio.ensure_future(starting.answer(calls[1:]))
    await asyncio.sleep(0)
    await asyncio.gather(starting.close(), tools.close())
    for answers in (work, first):
        with pytest.raises(Conflict, match="was deleted during a tool call"):
            await answers
    assert telemetry.REGISTRY.get_sample_value("volley_env_sandboxes") == before
