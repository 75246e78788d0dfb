"""Long calls take turns: whose turn it is, and that a sandbox whose turn it is not stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.errors import VolleyError
from volley_sandbox.sandbox.limits import EnvironmentProgram, ScriptProgram
from volley_sandbox.sandbox.long_calls import Turns
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.sandbox.tier import RESTRICTED

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = {"source": "while True: pass", "stdin": "", "max_output": 1}
WORK = {
    "source": "import time\nwhile time.process_time() < 0.25: pass\nprint('done')",
    "stdin": "",
    "max_output": 100,
}


@dataclass(eq=False)
class Caller:
    """Writes down when its turn begins, and may not be paused or resumed twice in a row."""

    name: str
    began: list[str]
    paused: bool = field(default=False)

    @property
    def owner(self) -> str:
        return self.name[0]

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False
        self.began.append(self.name)


@contextmanager
def callers(names: str, n_places: int) -> Iterator[tuple[list[str], dict[str, Caller], Turns[Caller]]]:
    """All have left in the end, and none is paused."""
    began, turns = list[str](), Turns[Caller](n_places)
    them = {name: Caller(name, began) for name in names.split()}
    yield began, them, turns
    for one in them.values():
        turns.leave(one)
    assert not any(one.paused for one in them.values())


async def test_turns_go_round_the_owners_and_then_round_the_sandboxes_of_each():
    with callers("a1 a2 a3 b1", 1) as (began, them, turns):
        for one in them.values():
            turns.join(one)
        assert [name for name, one in them.items() if one.paused] == ["a2", "a3", "b1"]
        for _ in range(9):
            turns.rotate()  # by hand, though a timer runs: nothing waits here
            assert sum(not one.paused for one in them.values()) == 1
        assert began == ["a2", "b1", "a3", "b1", "a1", "b1", "a2", "b1", "a3"]


async def test_every_place_is_taken_while_one_waits():
    with callers("a1 a2 a3 b1 c1", 2) as (began, them, turns):
        for one in them.values():
            turns.join(one)
        turns.leave(them["a2"])
        assert began == ["a3"]
        turns.leave(them["b1"])  # it waits: its call was answered at the moment it was paused, or it has died
        assert began == ["a3", "b1"]
        turns.rotate()
        assert [name for name, one in them.items() if not one.paused] == ["a2", "a3", "b1", "c1"]


async def test_who_has_not_joined_may_leave_and_who_has_a_place_alone_keeps_it():
    with callers("a1 a2", 1) as (began, them, turns):
        turns.leave(them["a1"])
        turns.join(them["a1"])
        turns.rotate()
        assert began == []
        turns.leave(them["a1"])
        turns.join(them["a2"])
        assert not them["a2"].paused


async def test_turns_end_by_themselves_also_where_others_come_and_go():
    with callers("a1 b1", 1) as (began, them, turns):
        for one in them.values():
            turns.join(one)
        async with asyncio.timeout(120):
            while len(began) < 6:
                passing = Caller("c1", [])
                turns.join(passing)
                await asyncio.sleep(0.001)
                turns.leave(passing)


def state_of(sandbox: Sandbox) -> str:
    """Of a process without namespaces: R, S, T (stopped), …, proc(5); empty before its number is known."""
    if sandbox.pid is None:
        return ""
    return Path(f"/proc/{sandbox.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


async def stands_still(sandbox: Sandbox) -> None:
    """Returns when it is stopped; at once where its process cannot be seen from here."""
    async with asyncio.timeout(60):
        while not sandbox.spawner.tier.namespaces and state_of(sandbox) != "T":
            await asyncio.sleep(0.01)


async def test_sandboxes_stand_still_while_others_have_their_turn():
    """With one place, three loops of one owner leave room for the work of another; who is ended while it is paused ends
    at once, and whose call is answered is not paused any more. Who has no owner is never paused.
    """
    async with Sandboxes(namespaces=False, n_long_calls=1) as sandboxes:
        if (await sandboxes.probe()).level < RESTRICTED:
            pytest.skip("there is no sandbox here")
        loops = [await sandboxes.start(ScriptProgram(), owner="loops") for _ in range(3)]
        worker = await sandboxes.start(ScriptProgram(), owner="work")
        graded = await sandboxes.start(ScriptProgram())
        looping = [asyncio.ensure_future(loop.call("run", ENDLESS, 60)) for loop in (graded, *loops)]
        try:
            async with asyncio.timeout(60):
                while sum(state_of(loop) == "T" for loop in loops) < 2:
                    assert state_of(graded) != "T"
                    await asyncio.sleep(0.01)
                assert (await worker.call("run", WORK, 50))["stdout"] == "done\n"
                assert state_of(graded) != "T"
                assert await worker.call("ping", {}, 30) == "pong"
        finally:
            for call in looping:
                call.cancel()
            await asyncio.gather(*(one.close() for one in (*loops, worker, graded)))
            for call in looping:
                with suppress(asyncio.CancelledError, VolleyError):
                    await call


COMPUTES_ON = """
import threading

class Busy:
    splits = {"train": 10}
    n = 0

    def reset(self, split, index, seed):
        return "hello"

    def step(self, text):
        if text == "begin":
            threading.Thread(target=self.loop, daemon=True).start()
        return str(self.n), 0.0, False, False, {}

    def loop(self):
        while True:
            self.n += 1
"""


async def test_what_computes_between_its_calls_is_paused_between_them(sandboxes: Sandboxes):
    sandbox = await sandboxes.start(EnvironmentProgram(COMPUTES_ON))
    await sandbox.call("reset", {"split": "train", "index": 0, "seed": 0}, 30)
    neighbour = await sandboxes.start(EnvironmentProgram(COMPUTES_ON))
    await neighbour.call("reset", {"split": "train", "index": 0, "seed": 0}, 30)

    async def count(text: str) -> int:
        said = await sandbox.call("step", {"message": {"role": "assistant", "content": text}}, 30)
        return int(said["messages"][0]["content"])

    await count("begin")
    async with asyncio.timeout(60):
        while not sandbox.pauses_between_calls:
            await asyncio.sleep(0.01)
    for _ in range(2):
        await stands_still(sandbox)
        assert await count("go on") > 0
    assert not neighbour.pauses_between_calls
    for one in (sandbox, neighbour):
        await one.close()
