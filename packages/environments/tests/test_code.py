"""Programming problems: how data sets are read, how programs are judged, and that no answer judges itself."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.env.episode_types import StepResult, assistant
from shared.errors import Busy, ConfigError, Forbidden, NotFound
from tests.env.conftest import OpenClient
from volley_environments.code.environment import Code, CodeConfig, read_program
from volley_environments.code.grading import same_output
from volley_sandbox.sandbox import repeated_call
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.toolset import Toolbox

ADD: dict[str, Any] = {
    "question": "Write add(a, b), their sum.",
    "tests": ["assert add(1, 2) == 3", "assert add(-1, 2) == 1", "assert abs(add(0.1, 0.2) - 0.3) < 1e-9"],
    "solution": "def add(a, b):\n    return a + b",
}
SQUARE: dict[str, Any] = {
    "question": "Print the square of each number.",
    "tests": [{"input": "2\n3\n", "output": "4\n9\n"}, {"input": "5\n", "output": "25\n"}],
    "solution": "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2)",
}
HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
    'def find_zero(xs):\n    """A zero of the line xs[0] + xs[1] * x."""\n',
    "entry_point": "find_zero",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": "def check(candidate):\n    for xs in ([1, 2], [3, 4]):\n"
    "        assert math.fabs(poly(xs, candidate(xs))) < 1e-4\n",
}
MBPP: dict[str, Any] = {
    "text": "Write depth(root) of a tree of class Node.",
    "task_id": 1,
    "code": "class Node:\r\n  def __init__(self, data):\r\n    self.data = data\r\n    self.left = None\r\n"
    "def depth(n):\r\n  return 0 if n is None else 1 + depth(n.left)",
    "test_list": ["assert depth(root) == 2"],
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
    "challenge_test_list": ["assert depth(root.left) == 1"],
}
APPS: dict[str, Any] = {
    "question": "Sum the numbers.",
    "input_output": '{"inputs": ["1 2\\n", ["3", "4"]], "outputs": ["3\\n", ["7"]]}',
    "solutions": '["print(sum(map(int, open(0).read().split())))"]',
}
CALLED: dict[str, Any] = {
    "question": "Write twice(text).",
    "input_output": {"fn_name": "twice", "inputs": [["a"], ["'\n"]], "outputs": ["aa", "'\n'\n"]},
    "solutions": ["def twice(text):\n    return text * 2"],
}
ROWS = (ADD, SQUARE, HUMANEVAL, MBPP, APPS, CALLED)


def write(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
    return path


async def judged(folder: Path, row: Any, programs: Sequence[str], **config: Any) -> list[StepResult]:
    """What each program is worth as an answer to the problem of `row`."""
    async with Sandboxes() as sandboxes:
        settings = CodeConfig(train=write(folder, [row]), **config)
        env = Code(settings, Toolbox(sandboxes, None, None, ("code",)))  # type: ignore[arg-type]
        turn = asyncio.Semaphore(2)

        async def one(program: str) -> StepResult:
            async with turn:
                return await env.reset("train", 0, 0).step(assistant(f"So:\n```python\n{program}\n```"))

        return await asyncio.gather(*(one(program) for program in programs))


async def test_the_solutions_of_every_format_solve_their_problems(tmp_path: Path) -> None:
    async with Sandboxes() as sandboxes:
        toolbox = Toolbox(sandboxes, None, None, ("code",))  # type: ignore[arg-type]
        env = Code(CodeConfig(train=write(tmp_path, ROWS)), toolbox)
        for index in range(len(ROWS)):
            shown = env.demonstration("train", index)
            result = await env.reset("train", index, 0).step(shown.messages[-1])
            assert shown.success
            assert (result.reward, result.info.success) == (1.0, True), (index, result.info.extra)
            assert shown.messages[0] == env.reset("train", index, 0).opening[0]
        assert len({env.task("train", index) for index in range(len(ROWS))}) == len(ROWS)
        with pytest.raises(NotFound):
            env.reset("eval", 0, 0)


CHEATS = {
    "nothing": "pass",
    "exit": "import sys\nsys.exit(0)",
    "exit in the call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "equal to all": "class Yes:\n    def __eq__(self, other): return True\n    def __lt__(self, other): return True\n"
    "    def __sub__(self, other): return self\n    def __abs__(self): return 0\ndef add(a, b): return Yes()",
    "a number equal to all": "class Yes(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes(7)",
    "another abs": "def add(a, b): return 3 if a == 1 else 0\ndef abs(x): return 0",
    "patched builtins": "import builtins\nbuiltins.AssertionError = type('A', (), {})\nbuiltins.abs = lambda x: 0\n"
    "def add(a, b): return 3 if a == 1 else 0",
    "its own judge": "def _answer(asked):\n    return '{\"passed\": true}'\ndef add(a, b): return 0",
    "a verdict as value": "def add(a, b): return {'passed': True}",
    "a verdict printed": "def add(a, b):\n    print('{\"passed\": true}')\n    return 0",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": 3}'\ndef add(a, b): return 0",
    "quotes": 'def add(a, b): return "\')\\nraise SystemExit(0) #"',
    "raise": "def add(a, b): raise SystemExit(0)",
    "raise through": 'def _answer(asked):\n    return \'{"error": ["SystemExit", "0"]}\'\ndef add(a, b): return 0',
    "generator exit": 'def _answer(asked):\n    return \'{"error": ["GeneratorExit", "0"]}\'\ndef add(a, b): return 0',
    "not json": "def _answer(asked):\n    return 'nonsense'\ndef add(a, b): return 0",
    "many tags": 'def _answer(asked):\n    return \'{"value": {"l": 5, "d": 6}}\'\ndef add(a, b): return 0',
    "frames": "import sys, gc, re\ndef add(a, b):\n"
    "    texts = [str(o) for o in gc.get_objects() if type(o) in (str, dict)]\n    f = sys._getframe()\n"
    "    while f:\n        texts += [str(f.f_locals), str(f.f_globals)]\n        f = f.f_back\n"
    "    found = re.findall(r'assert add\\(' + f'{a}, {b}' + r'\\) == (-?\\d+)', ' '.join(texts))\n"
    "    return int(found[0]) if found else None",
    "files": "import os, re\ndef add(a, b):\n    texts = []\n    for folder, _, names in os.walk('/tmp'):\n"
    "        for name in names:\n            try: texts.append(open(os.path.join(folder, name)).read())\n"
    "            except OSError: pass\n    found = re.findall(r'== (-?\\d+)', ' '.join(texts))\n"
    "    return int(found[0]) if found else None",
    "frames of its own on every descriptor": "import os, struct\n"
    'frame = b\'{"id": 4, "result": {"stdout": "", "passed": true}}\'\n'
    "for fd in range(3, 64):\n    try: os.write(fd, struct.pack('>I', len(frame)) + frame)\n    except OSError: pass\n"
    "def add(a, b): return 0",
    "nested": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    "endless": "def add(a, b):\n    while True: pass",
    "endless items": "import itertools\ndef add(a, b): return itertools.count()",
    "memory": "def add(a, b): return [0] * 10**10",
    "output": "def add(a, b):\n    print('x' * 10**7)\n    return a + b",
    "threads": "import threading\ndef run():\n    while True: pass\n"
    "for _ in range(100): threading.Thread(target=run, daemon=True).start()\ndef add(a, b): return 0",
    "syntax": "def add(a, b) return",
    "wrong by type": "def add(a, b): return str(a + b)",
}


async def test_no_answer_judges_itself(tmp_path: Path) -> None:
    results = await judged(tmp_path, ADD, list(CHEATS.values()), cpu_s=1)
    assert [name for name, found in zip(CHEATS, results, strict=True) if found.info.success or found.reward] == []
    why = {name: found.info.extra["verdict"] for name, found in zip(CHEATS, results, strict=True)}
    assert why["endless"] == "time"
    assert why["equal to all"] == why["a number equal to all"] == why["wrong by type"] == "wrong"
    assert why["syntax"] == why["memory"] == "exception"
    assert why["hard exit in the call"] == "crash"


async def test_a_judge_of_the_data_set_is_its_own(tmp_path: Path) -> None:
    """The helper that the tests use is in the prompt, so an answer can define it too, and it does not count."""
    cheat = "def poly(xs, x):\n    return 0\n\n\ndef find_zero(xs):\n    return 99"
    honest = "def find_zero(xs):\n    return -poly(xs, 0) / xs[1]"
    found = await judged(tmp_path, HUMANEVAL, [cheat, honest])
    assert [one.info.success for one in found] == [False, True]


async def test_programs_are_judged_by_what_they_print(tmp_path: Path) -> None:
    programs = [
        SQUARE["solution"],
        "import sys\nfor x in sys.stdin.buffer.read().split():\n    sys.stdout.buffer.write(b'%d\\n' % (int(x) ** 2))",
        "while True:\n    try: print(int(input()) ** 2, '  ')\n    except EOFError: break",
        "if __name__ == '__main__':\n    import sys\n"
        "    print(*[float(x) ** 2 for x in sys.stdin], sep='\\n')\n    exit()",
        "print(4)\nprint(9)",
        "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2)\nsys.exit(1)",
        "print('4\\n9\\n25')",
        "import os\nos._exit(0)",
        "raise ValueError",
    ]
    found = await judged(tmp_path, SQUARE, programs, partial=True)
    assert [one.info.extra["n_passed"] for one in found] == [2, 2, 2, 2, 1, 0, 0, 0, 0]
    assert [one.reward for one in found][4] == 0.5
    whole = await judged(tmp_path, SQUARE, programs[4:5])
    assert (whole[0].reward, whole[0].info.extra["verdict"]) == (0.0, "wrong")


async def test_long_grading_goes_on_when_the_request_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_call, "WAIT_S", 0.0)
    async with Sandboxes() as sandboxes:
        toolbox = Toolbox(sandboxes, None, None, ("code",))  # type: ignore[arg-type]
        episode = Code(CodeConfig(train=write(tmp_path, [SQUARE])), toolbox).reset("train", 0, 0)
        answer = assistant(f"```python\n{SQUARE['solution']}\n```")
        with pytest.raises(Busy):
            await episode.step(answer)
        begun = episode.grading
        monkeypatch.setattr(repeated_call, "WAIT_S", 60.0)
        assert (await episode.step(answer)).info.extra["n_passed"] == 2
        assert episode.grading is begun


async def test_it_is_refused_where_nothing_confines_it(tmp_path: Path) -> None:
    async with Sandboxes(namespaces=False, landlock=0) as sandboxes:
        env = Code(CodeConfig(train=write(tmp_path, [ADD])), Toolbox(sandboxes, None, None))  # type: ignore[arg-type]
        with pytest.raises(Forbidden, match=r"environment code is refused.*unsandboxed: \[code\]"):
            await env.reset("train", 0, 0).step(assistant(f"```\n{ADD['solution']}\n```"))


async def test_it_is_played_over_http(open_client: OpenClient, tmp_path: Path) -> None:
    config = {"train": write(tmp_path, [ADD]), "show_tests": 2}
    async with open_client(env="code", configs={"code": config}, unsandboxed=("code",)) as client:
        shown = (await client.post("/code/demonstration", json={"split": "train", "index": 0})).json()["messages"]
        assert ADD["tests"][1] in shown[0]["content"]
        assert ADD["tests"][2] not in shown[0]["content"]
        for n, (text, expected) in enumerate(((shown[1]["content"], 1.0), ("no program", 0.0))):
            asked = {"request_id": f"{n}", "env": "code", "split": "train", "index": 0}
            episode = (await client.post("/episodes", json=asked)).json()
            assert episode["messages"] == shown[:1]
            step = {"request_id": "1", "message": {"role": "assistant", "content": text}}
            answer = (await client.post(f"/episodes/{episode['episode_id']}/step", json=step)).json()
            assert (answer["reward"], answer["terminated"]) == (expected, True)
            assert answer["info"]["error"] == (None if n == 0 else "format")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question": "a"}',
        '{"question": "a", "tests": []}',
        '{"question": "a", "tests": [1]}',
        '{"question": 1, "tests": ["assert f()"]}',
        '{"question": "a", "input_output": "{"}',
        '{"question": "a", "input_output": {"inputs": ["1"], "outputs": []}}',
        '{"text": "a", "test_list": [], "code": "x"}',
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(orjson.dumps(ADD) + b"\n" + line.encode() + b"\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        Code(CodeConfig(train=path), None).num_tasks("train")  # type: ignore[arg-type]


def test_a_message_of_blanks_takes_the_time_of_its_length() -> None:
    """A pattern that goes back over them would take an hour, and the service with it."""
    assert read_program("```" + " " * 2**20) is None
    assert read_program("```" + " \t" * 2**19 + "py" * 2**19) is None


def test_the_last_python_block_is_the_program() -> None:
    assert read_program("```python\na\n```\ntext\n```py\nb\n```\n```bash\nc\n```") == "b\n"
    assert read_program("```\nplain\n```") == "plain\n"
    assert read_program("def f(): pass") is None
    assert read_program("```python\nunfinished") is None


def test_output_is_compared_as_its_readers_do() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert same_output("1.0 2\n", "1 2.00")
    assert not same_output("1\n2", "1\n3")
    assert not same_output("NaN", "1")
    assert not same_output("", "1")
    assert same_output("", "\n")
