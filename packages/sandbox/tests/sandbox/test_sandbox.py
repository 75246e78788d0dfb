"""A sandbox as the service uses it: the three ways to write an environment, failures, ends, restarts."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from shared.errors import InputError, RateLimited, SandboxFailed, SandboxLost, Unavailable
from tests.support.disk import no_more_files
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDER = """
# /// script
# dependencies = []
# ///
import random

class Adder:
    splits = {"train": 1000, "eval": 50}

    def reset(self, split, index, seed):
        rng = random.Random(f"{split}/{index}")
        self.a, self.b = rng.randrange(100), rng.randrange(100)
        return f"{self.a} + {self.b} = ?"

    def step(self, text):
        right = text.strip() == str(self.a + self.b)
        return "", float(right), True, False, {"success": right}

    def demonstration(self, split, index):
        asked = self.reset(split, index, 0)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": str(self.a + self.b)}]
"""

ASYNCHRONOUS = """
import asyncio

class Slow:
    splits = {"train": 2}

    async def reset(self, split, index, seed):
        await asyncio.sleep(0)
        return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], {}

    async def step(self, text):
        loud = await asyncio.to_thread(text.upper)
        info = {"reward_components": {"a": 1.0, "b": -0.5}, "error": "format", "seen": [1, None]}
        return loud, 0.5, False, False, info

    async def demonstration(self, split, index):
        return [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], False

    async def task(self, split, index):
        return f"slow {index}"
"""

GYMNASIUM = '''
class Space:
    n, start = 3, 1

class Corridor:
    """Goes right to 3."""
    actions = ["left", "stay", "right"]
    action_space = Space()

    def __init__(self, render_mode=None, length=3):
        self.render_mode, self.length = render_mode, length

    def reset(self, *, seed=None, options=None):
        self.at, self.seed = 0, seed
        return self.at, {}

    def render(self):
        return f"at {self.at} of {self.length}"

    def step(self, action):
        self.at += action - 2
        return self.at, 1.0 if self.at == self.length else 0.0, self.at == self.length, False, {"seed": self.seed}
'''

EPISODES = """
class Game:
    def __init__(self, index):
        self.opening = ({"role": "user", "content": f"guess {index}"},)
        self.tools = ({"type": "function", "function": {"name": "look"}},)

    def step(self, message):
        return ({"role": "user", "content": message["content"]},), 1.0, True, False, {"success": True}

class Guess:
    splits = ("train", "eval")

    def num_tasks(self, split):
        return 7

    def task(self, split, index):
        return f"{split}-{index}"

    def reset(self, split, index, seed):
        return Game(index)
"""


async def opened(sandbox: Sandbox, split: str = "train", index: int = 0) -> answers.OpenedEpisode:
    return answers.read_opening(await sandbox.call("reset", {"split": split, "index": index, "seed": 1}, 30))


async def said(sandbox: Sandbox, text: str) -> answers.StepResult:
    message = {"role": "assistant", "content": text}
    return answers.read_step(await sandbox.call("step", {"message": message}, 30))


async def test_simple(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(ADDER, "adder.py"))
    described = answers.read_description(sandbox.description)
    assert (described.protocol, described.entry, described.splits) == ("simple", "Adder", {"train": 1000, "eval": 50})
    assert described.has_demonstration
    first = await opened(sandbox)
    assert first.task.startswith("train/0@")
    assert first.task == answers.read_task(await sandbox.call("task", {"split": "train", "index": 0}, 30))
    shown = answers.read_demonstration(await sandbox.call("demonstration", {"split": "train", "index": 0}, 30))
    assert shown.messages[0] == first.messages[0]
    result = await said(sandbox, shown.messages[-1]["content"])
    assert (result.reward, result.terminated, result.truncated, result.messages) == (1.0, True, False, ())
    assert result.info.success
    assert result.info.reward_components == {"reward": 1.0}
    await sandbox.close()


async def test_asynchronous(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(ASYNCHRONOUS))
    first = await opened(sandbox)
    assert first.task == "slow 0"
    assert [message["role"] for message in first.messages] == ["system", "user"]
    result = await said(sandbox, "loud")
    assert result.messages == ({"role": "user", "content": "LOUD"},)
    assert result.info.error == "format"
    assert result.info.reward_components == {"a": 1.0, "b": -0.5}
    assert result.info.extra == {"seen": [1, None]}
    shown = answers.read_demonstration(await sandbox.call("demonstration", {"split": "train", "index": 0}, 30))
    assert not shown.success
    await sandbox.close()


async def test_gymnasium(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(GYMNASIUM, config={"length": 2}))
    described = answers.read_description(sandbox.description)
    assert described.protocol == "gymnasium"
    assert described.splits == {"train": 100_000, "eval": 256}
    assert (await opened(sandbox)).messages == ({"role": "user", "content": "at 0 of 2"},)
    assert (await said(sandbox, " Right ")).messages[0]["content"] == "at 1 of 2"
    assert (await said(sandbox, "jump")).info.error == "invalid_action"
    assert (await said(sandbox, "4")).info.error == "invalid_action"
    assert (await said(sandbox, "I'd rather go to the right, I think!")).info.error == "format"
    assert (await said(sandbox, "I think <answer>2</answer>")).messages[0]["content"] == "at 1 of 2"
    tags = "<answer>" * 3 + "2</answer></answer><answer>"  # the last that is closed; and without end, at once
    assert (await said(sandbox, tags)).messages[0]["content"] == "at 1 of 2"
    assert (await said(sandbox, "<answer>" * 60_000)).info.error == "format"
    last = await said(sandbox, "3")
    assert (last.reward, last.terminated, last.info.success) == (1.0, True, True)
    seeds = []
    for split in ("train", "eval"):
        for index in range(4):
            await opened(sandbox, split, index)
            seeds.append((await said(sandbox, "left")).info.extra["seed"])
    assert [seed % 2 for seed in seeds] == [0] * 4 + [1] * 4
    assert len(set(seeds)) == 8
    await sandbox.close()


async def test_episodes_as_objects(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(EPISODES))
    described = answers.read_description(sandbox.description)
    assert (described.protocol, described.splits) == ("volley", {"train": 7, "eval": 7})
    first = await opened(sandbox, "eval", 3)
    assert (first.task, first.messages[0]["content"]) == ("eval-3", "guess 3")
    assert first.tools == [{"type": "function", "function": {"name": "look"}}]
    assert (await said(sandbox, "x")).info.success
    with pytest.raises(SandboxFailed, match="the episode is over") as over:
        await said(sandbox, "x")
    assert over.value.alive
    await sandbox.close()


async def test_the_entry_may_be_named(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(ADDER + "\nclass Other(Adder): pass\n", entry="Adder"))
    assert answers.read_description(sandbox.description).entry == "Adder"
    await sandbox.close()
    with pytest.raises(SandboxFailed, match="there is no class Nobody; there are: Adder"):
        await sandboxes.start(EnvironmentProgram(ADDER, entry="Nobody"))


@pytest.mark.parametrize(
    ("source", "why", "match"),
    [
        ("x = 1", "refused", "no class has the methods reset and step"),
        ("class A:\n  def reset(self): pass\n  def step(self, x): pass", "refused", r"A.reset takes \(self\)"),
        (ADDER.replace('{"train": 1000, "eval": 50}', "[1]"), "refused", "splits must be a dict"),
        (ADDER.replace("1000", "0"), "refused", "must be a number of tasks"),
        ("def broken(:", "exception", r"SyntaxError.*\n  File \"environment.py\", line 1"),
        ("import nowhere", "exception", "ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(3)", "exception", r"the code called exit\(3\)"),
        ("x = [0] * 10 ** 10", "memory", "MemoryError"),
    ],
)
async def test_a_file_that_cannot_be_used(sandboxes: Sandboxes, source: str, why: str, match: str):
    with pytest.raises(SandboxFailed, match=match) as failed:
        await sandboxes.start(EnvironmentProgram(source))
    assert failed.value.why == why


async def test_an_agent_without_a_program_is_named(sandboxes: Sandboxes):
    late = "class A:\n  splits = {'train': 3}\n  def reset(self, split, index, seed):\n    self.command = ['a']\n"
    sandbox = await sandboxes.start(
        EnvironmentProgram(late + "    return 'x'\n  def judge(self, output): return 1.0\n")
    )
    with pytest.raises(SandboxFailed, match=r"A has judge, but neither run\(.*\) nor command, set in the class"):
        await sandbox.call("reset", {"split": "train", "index": 0, "seed": 0}, 20.0)
    await sandbox.close()


ENDLESS = """
import itertools

class Endless(dict):
    def items(self):
        return ((str(i), 1) for i in itertools.count())
    def __bool__(self):
        return True

class Trap:
    splits = {"train": 3}
    tools = ()
    def reset(self, split, index, seed):
        return "u"
    def step(self, text):
        return "u", 1.0, True, False, {}
"""


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('splits = {"train": 3}', "splits = Endless()", {"refused"}),
        ('splits = {"train": 3}', "splits = itertools.count()", {"refused"}),
        ('splits = {"train": 3}', "splits = property(lambda self: next(x for x in iter(int, 1) if x))", {"time"}),
        ('splits = {"train": 3}', 'splits = {"x" * 10**7: 3}', {"refused"}),
        ('splits = {"train": 3}', 'splits = {"train": 10**5000}', {"refused", "exception"}),
        ("tools = ()", "tools = itertools.repeat({})", {"refused"}),
        ("tools = ()", 'tools = [{"x": "y" * 10**7}]', {"output"}),
        ("tools = ()", "tools = [[]]\n    for _ in range(10**5): tools = [tools]", {"refused"}),
        ("tools = ()", 'tools = [{"x": float("nan")}]', {"refused"}),
        ("tools = ()", "tools = [{}]\n    tools[0]['self'] = tools[0]", {"refused"}),
        ("class Trap:", "class Meta(type):\n  def __getattribute__(c, n): return 1 / 0\nclass Trap(metaclass=Meta):",
         {"exception", "refused"}),
        ("def reset(self", "def __init__(self):\n        while True: pass\n    def reset(self", {"time"}),
    ],
)  # fmt: skip
async def test_a_description_without_end(sandboxes: Sandboxes, before: str, after: str, why: set[str]):
    assert before in ENDLESS
    deadline_s = 0.5 if why == {"time"} else 30
    with pytest.raises(SandboxFailed) as failed:
        await sandboxes.start(EnvironmentProgram(ENDLESS.replace(before, after)), deadline_s=deadline_s)
    assert failed.value.why in why, failed.value
    assert len(failed.value.detail) < 3000


async def test_an_exception_cannot_steer_a_terminal(sandboxes: Sandboxes):
    with pytest.raises(SandboxFailed) as failed:
        await sandboxes.start(EnvironmentProgram("raise ValueError('\\x1b[2J\\r\\x00 gone')"))
    assert failed.value.detail.startswith(r"ValueError: \x1b[2J\r\x00 gone")


async def test_an_exception_names_the_author_s_line_and_leaves_the_sandbox_alive(sandboxes: Sandboxes):
    source = ADDER.replace("right = text", "if text == 'x': self.helper()\n        right = text")
    source += "\n    def helper(self):\n        import json\n        json.loads('{')\n"
    sandbox = await sandboxes.start(EnvironmentProgram(source, "adder.py"))
    await opened(sandbox)
    with pytest.raises(SandboxFailed) as failed:
        await said(sandbox, "x")
    assert failed.value.why == "exception"
    assert failed.value.alive
    assert "JSONDecodeError: Expecting property name" in failed.value.detail
    assert 'File "adder.py", line 26, in helper: json.loads(' in failed.value.detail
    assert "decoder.py" not in failed.value.detail
    assert (await said(sandbox, "1")).terminated
    await sandbox.close()


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ("'', float('nan'), True, False, {}", "reward is nan; it must be finite"),
        ("'', 1e7, True, False, {}", "reward is 10000000.0; it must be finite and at most"),
        ("'', 'much', True, False, {}", "reward must be a number, not str"),
        ("'', 1.0, True, False", "five|step must return"),
        ("'', 1.0, False, False, {}", "returned no observation although the episode continues"),
        ("7, 1.0, True, False, {}", "must be a text or a list of chat messages, not int"),
        ("[{'role': 'robot', 'content': ''}], 1.0, True, False, {}", r"\[0\] has the role 'robot'"),
        ("'', 1.0, True, False, {'reward_components': {'a': 2}}", "sums to 2, and the reward is 1"),
        ("'', 1.0, True, False, {'error': 'mood'}", "must be one of format, invalid_action, tool"),
        ("'', 1.0, True, False, {'x': object()}", "info cannot be written as JSON: object"),
        ("'', 1.0, True, False, 3", "must be a dict, not int"),
        ("'x' * 2_000_000, 1.0, True, False, {}", "has 2000000 characters"),
    ],
)
async def test_what_step_may_not_return(sandboxes: Sandboxes, step: str, match: str):
    source = ADDER.replace('return "", float(right), True, False, {"success": right}', f"return {step}")
    sandbox = await sandboxes.start(EnvironmentProgram(source))
    await opened(sandbox)
    with pytest.raises(SandboxFailed, match=match) as failed:
        await said(sandbox, "1")
    assert failed.value.why == "refused"
    assert failed.value.alive
    await sandbox.close()


async def test_a_text_with_half_a_character_is_mended(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(ADDER.replace('return "", float', 'return "\\ud800", float')))
    await opened(sandbox)
    assert (await said(sandbox, "1")).messages[0]["content"] == "\ufffd"
    await sandbox.close()


async def test_scripts(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(ScriptProgram())

    async def run(source: str, stdin: str = "", most: int = 1000) -> answers.ScriptResult:
        request = {"source": source, "stdin": stdin, "max_output": most}
        return answers.read_script(await sandbox.call("run", request, 30))

    assert await run("print(input()[::-1])", "abc\n") == answers.ScriptResult("cba\n", "", 0, False)
    assert (await run("raise SystemExit(3)")).exit == 3
    failed = await run("import sys\nprint('no', file=sys.stderr)\n1 / 0")
    assert failed.exit == 1
    assert failed.stderr == 'no\nZeroDivisionError: division by zero\n  File "program.py", line 3, in <module>: 1 / 0\n'
    assert await run("print('x' * 100)", most=10) == answers.ScriptResult("x" * 10, "", 0, True)
    await sandbox.close()


async def test_the_log_is_kept_at_its_end(sandboxes: Sandboxes):
    source = ADDER.replace("rng = random", "print('x' * 5000, 'last')\n        rng = random", 1)
    sandbox = await sandboxes.start(EnvironmentProgram(source), SandboxLimits(log_bytes=1000))
    await sandbox.call("reset", {"split": "train", "index": 0, "seed": 0}, 30)
    await sandbox.close()
    assert sandbox.log.endswith("x last\n")
    assert len(sandbox.log) == 1000


async def test_a_call_over_its_deadline_ends_the_sandbox(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(
        EnvironmentProgram(ADDER.replace("right = text", "import time; time.sleep(60)\n        right = text"))
    )
    await opened(sandbox)
    with pytest.raises(SandboxFailed, match=r"step: step took longer than 0.2 s") as failed:
        await sandbox.call("step", {"message": {"role": "assistant", "content": "1"}}, 0.2)
    assert (failed.value.why, failed.value.alive) == ("time", False)
    with pytest.raises(SandboxFailed, match="took longer"):
        await opened(sandbox)
    await sandbox.close()


async def test_a_cancelled_call_ends_the_sandbox(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(ScriptProgram())
    request = {"source": "import time; time.sleep(60)", "stdin": "", "max_output": 10}
    call = asyncio.ensure_future(sandbox.call("run", request, 60))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not sandbox.alive
    await sandbox.close()


async def test_calls_at_once_are_answered_in_turn(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(ADDER))
    tasks = await asyncio.gather(*(sandbox.call("task", {"split": "eval", "index": i}, 30) for i in range(20)))
    assert [task.split("@")[0] for task in tasks] == [f"eval/{i}" for i in range(20)]
    await sandbox.close()


async def test_every_process_makes_the_same_tasks(sandboxes: Sandboxes):
    source = ADDER.replace('rng = random.Random(f"{split}/{index}")', "rng = random").replace(
        'return f"{self.a}', 'return str(hash(split)) + str({"a", "b", "c", split}) + f"{self.a}'
    )
    found = set()
    for _ in range(2):
        async with Sandboxes() as others:
            for _ in range(2):
                sandbox = await others.start(EnvironmentProgram(source))
                found.add((await opened(sandbox, "train", 7)).messages[0]["content"])
    assert len(found) == 1


async def test_what_cannot_be_sent(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(ScriptProgram())
    with pytest.raises(InputError, match="are not JSON"):
        await sandbox.call("run", {"source": {1, 2}}, 1)
    with pytest.raises(InputError, match="source has 2000000 characters"):
        await sandboxes.start(EnvironmentProgram("x" * 2_000_000))
    assert await sandbox.call("ping", {}, 30) == "pong"
    await sandbox.close()
    await sandbox.close()


async def test_more_than_may_run_at_once(sandboxes: Sandboxes):
    async with Sandboxes(max_running=2) as few:
        kept = [await few.start(ScriptProgram()) for _ in range(2)]
        with pytest.raises(RateLimited, match="2 sandboxes run already"):
            await few.start(ScriptProgram())
        await kept[0].close()
        await (await few.start(ScriptProgram())).close()


async def test_a_zygote_that_dies_takes_its_sandboxes_along_and_is_started_again():
    async with Sandboxes(namespaces=False) as own:
        sandbox = await own.start(ScriptProgram())
        async with asyncio.timeout(60):  # the zygote tells it, perhaps after the sandbox's first answer
            while (pid := sandbox.pid) is None:
                await asyncio.sleep(0.01)
        request = {"source": "import time; time.sleep(60)", "stdin": "", "max_output": 10}
        call = asyncio.ensure_future(sandbox.call("run", request, 60))
        await asyncio.sleep(0.1)
        sandbox.spawner.destroy()
        with pytest.raises(SandboxLost, match="the process that sandboxes are forked from is gone"):
            await call
        while is_zygote(pid):
            await asyncio.sleep(0.01)
        another = await own.start(ScriptProgram())
        assert await another.call("ping", {}, 30) == "pong"


def is_zygote(pid: int) -> bool:
    """Whether it is a zygote's process, or one forked from it."""
    try:
        return b"zygote.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def zygotes() -> set[int]:
    """The zygotes that are children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    return {pid for pid in map(int, children) if is_zygote(pid)}


async def test_an_interpreter_that_is_none_changes_nothing_for_others(sandboxes: Sandboxes):
    before = await sandboxes.probe()
    for python, match in (("/nowhere", "cannot be started"), ("/bin/true", "ended at once|is gone")):
        with pytest.raises(Unavailable, match=match):
            await sandboxes.start(ScriptProgram(python=Path(python)))
    sandbox = await sandboxes.start(ScriptProgram())
    assert sandbox.spawner.tier == before == sandboxes.tier
    await sandbox.close()


def other_pythons() -> list[Path]:
    """Interpreters on this machine that a sandbox can have, beside our own."""
    places = [Path("/usr/bin"), Path("/usr/local/bin"), *Path.home().glob(".pyenv/versions/3.*/bin")]
    found = {place / f"python3.{minor}" for place in places for minor in range(10, 15)}
    return sorted({path.resolve() for path in found if os.access(path, os.X_OK)} - {Path(sys.executable).resolve()})


async def test_other_versions_of_python(sandboxes: Sandboxes):
    found = other_pythons()
    if not found:
        pytest.skip("no other Python is installed")
    for python in found:
        sandbox = await sandboxes.start(EnvironmentProgram(ASYNCHRONOUS, python=python))
        assert (await opened(sandbox)).task == "slow 0"
        await sandbox.close()


async def test_nothing_lives_on_after_the_service():
    before = zygotes()
    async with Sandboxes() as own:
        sandbox = await own.start(ScriptProgram())
        folder = own.folder
        assert len(zygotes() - before) == 1
    assert not sandbox.alive
    assert not folder.exists()
    assert zygotes() == before


SERVICE = """
import asyncio, sys
from pathlib import Path
from volley_sandbox.sandbox.limits import ScriptProgram
from volley_sandbox.sandbox.sandboxes import Sandboxes

async def main():
    async with Sandboxes(folder=Path(sys.argv[1]), namespaces=sys.argv[2] == "True") as sandboxes:
        sandbox = await sandboxes.start(ScriptProgram())
        source = "import time\\nopen('left', 'w')\\nwhile True: time.sleep(1)"
        request = {"source": source, "stdin": "", "max_output": 1}
        call = asyncio.ensure_future(sandbox.call("run", request, 600))
        await asyncio.sleep(0.3)
        print("ready", flush=True)
        await call

asyncio.run(main())
"""


@pytest.mark.parametrize("namespaces", [True, False])
async def test_a_service_that_is_killed_leaves_no_process_and_its_folder_goes_with_the_next(
    namespaces: bool, tmp_path: Path
):
    command = [sys.executable, "-c", SERVICE, str(tmp_path), str(namespaces)]
    service = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert service.stdout is not None
    assert await service.stdout.readline() == b"ready\n"
    family = descendants(service.pid)
    assert len(family) >= 2
    service.kill()
    await service.wait()
    while any(is_zygote(pid) for pid in family):
        await asyncio.sleep(0.01)
    assert len(folders_in(tmp_path)) == 1
    async with Sandboxes(folder=tmp_path) as own:
        assert folders_in(tmp_path) == [own.folder]
    assert folders_in(tmp_path) == []


@pytest.mark.parametrize("namespaces", [True, False])
async def test_sandboxes_start_after_a_cleaner_removed_their_folder(namespaces: bool, tmp_path: Path) -> None:
    """As cleaners of temporary files do; even the whole temporary folder is gone."""
    place = tmp_path / "tmp"
    async with Sandboxes(folder=place, namespaces=namespaces) as own:
        first = await own.start(ScriptProgram())
        shutil.rmtree(place)
        second = await own.start(ScriptProgram())
        for sandbox in (first, second):
            assert await sandbox.call("ping", {}, 30) == "pong"
        assert folders_in(place) == [own.folder]
    assert folders_in(place) == []


def folders_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def descendants(pid: int) -> set[int]:
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()}
    return found.union(*map(descendants, found))


async def test_a_process_without_descriptors():
    async with Sandboxes() as own:
        kept = await own.start(ScriptProgram())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
        try:
            with pytest.raises(Unavailable, match="file descriptors"):
                await own.start(ScriptProgram())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await kept.call("ping", {}, 30) == "pong"
        await (await own.start(ScriptProgram())).close()


async def test_a_process_without_descriptors_starts_no_zygote():
    async with Sandboxes() as own:
        with no_more_files(), pytest.raises(Unavailable, match=r"cannot be started: .* file descriptors"):
            await own.probe()
        assert (await own.probe()) is own.tier
