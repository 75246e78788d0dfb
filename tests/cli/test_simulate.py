"""The simulation of hand-over and recovery, against what can be reckoned on paper."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tools.simulate import scenarios
from tools.simulate.assumptions import SIZES, Assumptions, Constant
from tools.simulate.fan_out import Links, spread


def test_one_server_takes_the_bytes_divided_by_the_slower_link() -> None:
    for up, down in ((2e9, 1e9), (1e9, 2e9)):
        found = spread(1, 10, 1e9, Links(up, down, latency=0.25))
        assert found.last_s == pytest.approx(10 * (0.25 + 1.0))
        assert found.sent == [10, 0]


def test_transfers_at_once_share_a_link() -> None:
    """Four at once take as long each as four one after the other: only their latencies overlap."""
    found = spread(1, 8, 1e9, Links(1e9, 1e9, served_at_once=4, pulled_at_once=4, latency=0.5))
    assert found.last_s == pytest.approx(2 * (0.5 + 4.0))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 15, 16, 64, 128])
def test_one_piece_doubles_its_holders_with_every_level(n: int) -> None:
    """The trainer and the servers that have it each serve one more: 2^k holders after k levels, one the trainer."""
    found = spread(n, 1, 1e9, Links(1e9, 1e9))
    assert found.last_s == pytest.approx(math.ceil(math.log2(n + 1)))
    assert sum(found.sent) == n


@pytest.mark.parametrize("n", [8, 64, 512])
def test_many_pieces_come_near_the_bound_of_one_link(n: int) -> None:
    """Nobody is served faster than one link carries a version; the tree's depth is paid by the piece."""
    found = spread(n, 64, 1e9, Links(1e9, 1e9, served_at_once=4, pulled_at_once=4))
    assert 64.0 <= found.last_s <= 1.6 * 64.0
    assert found.sent[0] <= 2 * 64
    assert sum(found.sent) == 64 * n
    assert all(len(times) == 64 and times == sorted(times) for times in found.arrivals)


def given(**constants: float) -> Assumptions:
    return Assumptions()._replace(**{name: Constant(value, "", "a test") for name, value in constants.items()})


def test_a_hand_over_is_the_sum_of_its_parts_where_nothing_overlaps() -> None:
    """One server; pieces are placed at once as they come, so that but the last is hidden."""
    size, fast = SIZES[0], 1e15
    links = {"network": 1e9, "send": fast, "receive": fast, "latency": 0.0}
    rates = {"take": 4e9, "place": 1e9, "hash": fast, "encode": fast, "decode": fast, "cores": 1, "check": 2, "swap": 1}
    found = scenarios.hand_over(size, 1, given(**links, **rates, served_at_once=1, pulled_at_once=1), delta=False)
    assert found.made_s == pytest.approx(2.0)
    assert found.pulled_s == pytest.approx(2.0 + 8.0)
    assert found.serving_s == pytest.approx(2.0 + 8.0 + 8.0 / scenarios.PIECES + 3.0)


def test_a_delta_moves_its_share_of_the_bytes() -> None:
    full, delta = (scenarios.hand_over(SIZES[1], 8, Assumptions(), delta=delta) for delta in (False, True))
    assert delta.gigabytes == pytest.approx(Assumptions().delta.value * full.gigabytes)
    assert delta.serving_s < full.serving_s < full.alone_s


def test_recovery_grows_by_a_step_for_each_step_since_the_checkpoint() -> None:
    size, constants = SIZES[2], Assumptions()
    near, far = (scenarios.recovery(size, distance, constants)["total_s"] for distance in (1, 11))
    assert far - near == pytest.approx(10 * scenarios.step_s(size, constants))
    read = size.parameters * constants.state.value / (size.hosts * constants.read.value)
    assert near == pytest.approx(constants.boot.value + read + scenarios.step_s(size, constants))


def test_it_prints_its_assumptions_and_writes_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.simulate", "--json", str(file)], capture_output=True, encoding="utf-8", check=True
    )
    written = json.loads(file.read_bytes())
    for name, constant in written["assumptions"].items():
        assert name in done.stdout
        assert constant["source"] in done.stdout
    assert len(written["hand_over"]) == 18
    assert {(one["model"], one["servers"]) for one in written["hand_over"]} >= {("4B", 8), ("235B", 512)}
