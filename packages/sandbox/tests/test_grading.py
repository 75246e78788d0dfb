"""Grading processes: what a careless library is made to do there reaches nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.errors import GradingBusy, GradingEnded, InputError, Unavailable, VolleyError
from volley_sandbox.grading import pool as pool_module
from volley_sandbox.grading.pool import GradingPool
from volley_sandbox.sandbox.inside import linux
from volley_sandbox.sandbox.process.seccomp import build_program


@pytest.fixture(scope="module")
def pool() -> GradingPool:
    return GradingPool("packages.sandbox.tests.grading_library")


def test_values_come_back_and_errors_are_the_librarys(pool: GradingPool) -> None:
    assert pool.call("echo", 1, "ü", [None], {"a": 0.5}) == [1, "ü", [None], {"a": 0.5}]
    assert pool.grade("echo", 1, "x" * 100_000) == [1, "x" * 100_000]
    for ask in (pool.call, pool.grade):
        with pytest.raises(InputError, match=r"this is not right \(write another\)"):
            ask("refuse", "this")
    with pytest.raises(VolleyError, match="fail failed: KeyError"):
        pool.call("fail")


def test_no_secret_of_the_service_goes_there(pool: GradingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "x")
    fresh = GradingPool("packages.sandbox.tests.grading_library")
    assert "SECRET_OF_THE_SERVICE" not in fresh.call("environment")
    fresh.close()


def test_an_import_goes_on_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_S", 0.05)
    slow = GradingPool("packages.sandbox.tests.slow_library", n_processes=1)
    with pytest.raises(Unavailable, match="still being imported"):
        slow.call("process")
    monkeypatch.setattr(pool_module, "START_S", 60.0)
    assert slow.call("process") == slow.call("process")
    slow.close()


def test_an_import_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_S", 0.05)
    monkeypatch.setattr(pool_module, "IMPORT_S", 0.0)
    slow = GradingPool("packages.sandbox.tests.slow_library")
    with pytest.raises(Unavailable, match="did not answer"):
        slow.call("process")


def test_an_answer_leaves_nothing_behind_for_the_next(pool: GradingPool) -> None:
    assert [pool.grade("remember", "a") for _ in range(3)] == [1, 1, 1]


CONFINED = ["write", "remove", "connect", "listen", "fork", "run", "kill"]


def is_confined() -> bool:
    try:
        return bool(build_program(signals=False, metadata=False)) and linux.landlock_abi() > 0
    except Unavailable:
        return False


@pytest.mark.skipif(not is_confined(), reason="needs Landlock and libseccomp")
@pytest.mark.parametrize("name", CONFINED)
def test_what_a_fork_may_not_do_is_refused(pool: GradingPool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    if name == "remove":
        path.write_text("kept", encoding="utf-8")
    assert pool.grade("attack", str(path), name) in ("PermissionError", "BlockingIOError", "OSError")
    assert path.exists() == (name == "remove")
    assert pool.call("echo", 1) == [1]


@pytest.mark.parametrize("name", ["loop", "sleepless", "memory", "recursion", "exit", "vanish"])
def test_what_takes_more_than_its_share_costs_its_own_answer(pool: GradingPool, tmp_path: Path, name: str) -> None:
    with pytest.raises(GradingEnded, match="its limits"):
        pool.grade("attack", str(tmp_path / "file"), name)
    assert pool.grade("echo", 2) == [2]


def test_an_answer_cannot_be_forged_for_the_next(pool: GradingPool, tmp_path: Path) -> None:
    assert pool.grade("attack", str(tmp_path), "forge") == "done"
    assert pool.grade("echo", 2) == [2]


def test_many_threads_get_their_own_answers(pool: GradingPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: pool.grade("echo", n), range(40))) == [[n] for n in range(40)]


def test_a_process_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CALL_S", 1.0)
    fresh = GradingPool("packages.sandbox.tests.grading_library", n_processes=1)
    with pytest.raises(Unavailable, match="did not answer within 1 s"):
        fresh.call("hang")
    monkeypatch.undo()
    assert fresh.call("echo", 3) == [3]
    fresh.close()


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(InputError, match=r"No module named 'nowhere' .*install"):
        GradingPool("nowhere").call("echo")


def test_a_wait_for_a_free_process_is_told_apart_from_a_failure() -> None:
    pool = GradingPool("packages.sandbox.tests.grading_library", n_processes=0, wait_s=0.0)
    with pytest.raises(GradingBusy, match="all grading processes are busy"):
        pool.grade("anything")
