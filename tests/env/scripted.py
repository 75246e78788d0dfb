"""An environment whose behaviour a test sets: it counts calls, and can block, fail or end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.env.catalogue import CatalogueEntry
from services.env.episode_types import Demonstration, Info, Message, StepResult, assistant, check_task, user
from services.env.threads import InThreads, ThreadRunner


@dataclass
class ScriptedEpisode:
    env: ScriptedEnvironment
    steps: int = 0
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def opening(self) -> tuple[Message, ...]:
        return (user(f"step {self.steps}"),)

    def step(self, message: Message) -> StepResult:
        self.steps += 1
        self.env.calls.append(message["content"])
        self.env.on_step()
        return StepResult(
            (user(f"step {self.steps}"),), 1.0, message["content"] == "end", False, Info({"one": 1.0}, False)
        )


@dataclass
class ScriptedEnvironment:
    on_reset: Callable[[], object] = lambda: None
    on_step: Callable[[], object] = lambda: None
    calls: list[str] = field(default_factory=list[str])
    splits: tuple[str, ...] = ("train",)

    def num_tasks(self, split: str) -> int:
        check_task("scripted", {"train": 10}, split, 0)
        return 10

    def task(self, split: str, index: int) -> str:
        check_task("scripted", {"train": 10}, split, index)
        return f"{split}/{index}"

    def reset(self, split: str, index: int, seed: int) -> ScriptedEpisode:
        check_task("scripted", {"train": 10}, split, index)
        self.calls.append(f"reset {index} {seed}")
        self.on_reset()
        return ScriptedEpisode(self)

    def demonstration(self, split: str, index: int) -> Demonstration:
        return Demonstration((user("?"), assistant("end")), success=True)


def entry(env: ScriptedEnvironment, runner: ThreadRunner, kind: str = "scripted") -> CatalogueEntry:
    return CatalogueEntry("scripted", kind, {}, InThreads("scripted", kind, lambda: env, runner))


def until(event: threading.Event) -> Callable[[], object]:
    """Blocks a call until the event is set (60 s at most)."""
    return lambda: event.wait(60)
