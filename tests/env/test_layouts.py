import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.environments.games.frozen_lake import FrozenLakeConfig, frozen_lake
from services.env.environments.games.layouts import Effort, Layouts, canonical, seed_of, split_of
from shared.errors import InputError, NotFound, RateLimited, Unavailable
from volley_environments.games.sokoban import SokobanConfig, sokoban
from volley_environments.games.sokoban_level import draw

square = (
    st.integers(1, 5)
    .flatmap(lambda n: st.lists(st.text("ab#", min_size=n, max_size=n), min_size=n, max_size=n))
    .map(tuple)
)


@given(square)
def test_a_mirrored_layout_belongs_to_the_same_split(rows: tuple[str, ...]) -> None:
    turned = tuple("".join(column) for column in zip(*rows[::-1], strict=True))
    for other in (turned, rows[::-1], tuple(row[::-1] for row in rows)):
        assert canonical(other) == canonical(rows)
        assert split_of(other) == split_of(rows)


@given(st.integers(0, 10**6), st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 100))
def test_no_seed_serves_both_splits(index: int, draw_: int, other_index: int, other_draw: int) -> None:
    assert seed_of("x", "train", index, draw_) != seed_of("x", "eval", other_index, other_draw)


def boards(name: str, split: str, n: int) -> list[tuple[str, ...]]:
    if name == "frozen_lake":
        lake = frozen_lake(FrozenLakeConfig())
        return [lake.layouts.get(split, i).layout for i in range(n)]
    levels = sokoban(SokobanConfig()).layouts
    return [draw(level.room, level.start) for level in (levels.get(split, i).layout for i in range(n))]


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_evaluation_layouts_are_new_and_distinct(name: str) -> None:
    """All default evaluation tasks against 2,000 training tasks, mirrored and turned ones included."""
    trained = {canonical(rows) for rows in boards(name, "train", 2000)}
    held_out = boards(name, "eval", 256)
    assert len(set(held_out)) == 256
    assert not trained & {canonical(rows) for rows in held_out}


def test_a_layout_that_was_drawn_ahead_is_not_made_again() -> None:
    made: list[int] = []

    def make(seed: int, effort: Effort) -> tuple[str, ...]:
        made.append(seed)
        return (str(seed),)

    layouts = Layouts("x", make, lambda rows: rows, {"train": 20, "eval": 20}, distinct_train=True)
    last = layouts.get("train", 19)
    n_drawn = len(made)
    found = [layouts.get("train", index) for index in range(20)]
    assert len(made) == n_drawn
    assert found[19] is last
    assert [one.layout for one in found] == [(str(one.seed),) for one in found]


def test_tasks_do_not_depend_on_order_or_process() -> None:
    program = (
        "from services.env.environments.games.frozen_lake import *\n"
        "from volley_environments.games.sokoban import *\n"
        "for env in (frozen_lake(FrozenLakeConfig()), sokoban(SokobanConfig())):\n"
        "    print(*(env.task(s, i) for s in ('eval', 'train') for i in (7, 2)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, encoding="utf-8", timeout=60
    ).stdout.split()
    envs = (frozen_lake(FrozenLakeConfig()), sokoban(SokobanConfig()))
    assert there == [env.task(split, i) for env in envs for split in ("eval", "train") for i in (7, 2)]
    again = (frozen_lake(FrozenLakeConfig()), sokoban(SokobanConfig()))
    assert sorted(there) == sorted(env.task(split, i) for env in again for split in ("train", "eval") for i in (2, 7))


def test_too_few_layouts_is_said() -> None:
    layouts = Layouts("tiny", lambda seed, effort: ("a",), lambda rows: rows, {"train": 5, "eval": 5})
    split = split_of(("a",))
    other = "train" if split == "eval" else "eval"
    with pytest.raises(InputError, match=f"no (new )?layout for {other} task 0 .*{other}_tasks"):
        layouts.get(other, 0)


@pytest.mark.parametrize(("split", "index"), [("test", 0), ("train", -1), ("train", 100_000), ("eval", 256)])
def test_unknown_tasks_are_refused(split: str, index: int) -> None:
    env = frozen_lake(FrozenLakeConfig())
    for call in (env.task, env.demonstration, lambda s, i: env.reset(s, i, 0)):
        with pytest.raises(NotFound):
            call(split, index)


def test_a_call_draws_with_a_bounded_effort_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has steps for a few layouts only; asking again gets there, with the layouts it would have
    had at once.
    """
    made: list[int] = []

    def make(seed: int, effort: Effort) -> tuple[str, ...]:
        made.append(seed)
        effort.spend(100)
        return (f"{seed}",)

    def layouts() -> Layouts[tuple[str, ...]]:
        return Layouts("slow", make, lambda rows: rows, {"train": 50, "eval": 50}, distinct_train=True)

    at_once = layouts().get("train", 20)
    monkeypatch.setattr("services.env.environments.games.layouts.MAX_EFFORT", 1000)
    slow, refusals = layouts(), 0
    while refusals < 1000:
        made.clear()
        try:
            assert slow.get("train", 20) == at_once
            break
        except RateLimited:
            refusals += 1
        assert 100 * len(made) <= 2 * 1000
    assert refusals > 0


def test_a_call_that_takes_long_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time at all: each call still draws one layout, and the layouts are those of a patient call."""

    def make(seed: int, effort: Effort) -> tuple[str, ...]:
        effort.spend(1)
        return (f"{seed}",)

    def layouts() -> Layouts[tuple[str, ...]]:
        return Layouts("slow", make, lambda rows: rows, {"train": 50, "eval": 50})

    patient = layouts().get("eval", 5)
    monkeypatch.setattr("services.env.environments.games.layouts.DRAW_S", -1.0)
    hasty = layouts()
    for _ in range(5):
        with pytest.raises(RateLimited, match="eval task 5 is not among them"):
            hasty.get("eval", 5)
    assert hasty.get("eval", 5) == patient


def test_a_layout_that_takes_too_much_is_refused_with_the_settings_that_make_it_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(seed: int, effort: Effort) -> None:
        effort.spend(100)

    monkeypatch.setattr("services.env.environments.games.layouts.MAX_EFFORT", 1000)
    layouts: Layouts[tuple[str, ...]] = Layouts(
        "rare", make, lambda rows: rows, {"train": 5, "eval": 5}, advice="raise x"
    )
    for split in ("train", "eval"):
        with pytest.raises(InputError, match=f"{split} task 0 in 10 draws.*raise x, or lower {split}_tasks"):
            layouts.get(split, 0)


def test_nobody_waits_long_for_another_who_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def make(seed: int, effort: Effort) -> tuple[str, ...]:
        begun.set()
        gate.wait(60)
        return (f"{seed}",)

    layouts = Layouts("held", make, lambda rows: rows, {"train": 5, "eval": 5})
    monkeypatch.setattr("services.env.environments.games.layouts.WAIT_S", 0.05)

    def draw_one() -> None:
        with contextlib.suppress(Unavailable):
            layouts.get("eval", 0)

    drawing = threading.Thread(target=draw_one)
    drawing.start()
    begun.wait(60)
    with pytest.raises(Unavailable, match="eval task 0"):
        layouts.get("eval", 0)
    gate.set()
    drawing.join()


@pytest.mark.parametrize("make", [frozen_lake, sokoban])
def test_a_configuration_without_bounds_is_refused(make: Callable[[Any], Any]) -> None:
    config = FrozenLakeConfig if make is frozen_lake else SokobanConfig
    assert config(distinct_train=True, train_tasks=10_000)
    for wrong in (
        {"distinct_train": True, "train_tasks": 10_001},
        {"format_penalty": float("-inf")},
        {"format_penalty": -1e300},
    ):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            config.model_validate(wrong)
