from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared.errors import WeightsError
from shared.run import ledger
from shared.run import state as states
from shared.run.chain import Chain
from shared.run.lineage import epoch_of, in_lineage, until
from shared.run.progress import TicketProgress
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion

type Lineage = tuple[tuple[int, int], ...]


def written(folder: Path, state: TrainerState, **extra: object) -> Path:
    (folder / states.STATE).write_bytes(state.to_json(**{"optimizer_files": [], "seal": "", **extra}))
    return folder


def with_lines(n: int, per_step: int) -> TrainerState:
    """After `n` groups since the last checkpoint."""
    version, begun = WeightVersion(999_999, 999_999), initial_state(0).starting_epoch(1, keep_reference=False)
    lines = tuple(
        ledger.line(
            10_000_000 + i, "trained", WeightVersion(1, 1 + i // per_step), versions=(version, version), digest="0" * 64
        )
        for i in range(n)
    )
    return begun.at(n // per_step, TicketProgress(n), issued=n, done=False, chain=Chain(), recent=lines)


def test_a_state_of_as_many_lines_as_a_configuration_allows_is_read_again(tmp_path: Path) -> None:
    """Of half as many, which are more than a million values; twice as large a file is within both bounds."""
    state = with_lines(50_000, 1_000)
    assert states.read(written(tmp_path, state))[0] == state
    text = (tmp_path / states.STATE).read_bytes()
    values = text.count(b",") + text.count(b"[") + text.count(b"{") + text.count(b'"') // 2
    assert 2 * len(text) < states.MAX_STATE_BYTES
    assert 1_000_000 < values < states.MAX_STATE_BYTES // 12 // 2


def test_a_state_that_no_reader_takes_is_named_with_what_to_do(tmp_path: Path) -> None:
    state = initial_state(0).starting_epoch(1, keep_reference=False)
    written(tmp_path, state, padding="x" * states.MAX_STATE_BYTES)
    with pytest.raises(WeightsError, match="the older ones are kept") as raised:
        states.check_readable(tmp_path)
    assert "groups_per_step" in raised.value.hint


@pytest.mark.parametrize(
    "lineage",
    [[[1, 0], [1, 2]], [[2, 0], [1, 2]], [[1, 0], [2, 3], [3, 2]], [[epoch, 0] for epoch in range(1, 50_002)]],
    ids=["same epoch", "earlier epoch", "earlier step", "too long"],
)
def test_a_lineage_that_no_run_has_is_refused(tmp_path: Path, lineage: list[list[int]]) -> None:
    with pytest.raises(WeightsError, match="lineage"):
        states.read(written(tmp_path, initial_state(0).starting_epoch(1, keep_reference=False), lineage=lineage))


def test_a_run_restarted_ten_thousand_times_is_read(tmp_path: Path) -> None:
    lineage = tuple((epoch, epoch // 7) for epoch in range(10_000))
    state = replace(initial_state(0), epoch=9_999, step=2_000, lineage=lineage)
    assert states.read(written(tmp_path, state))[0] == state


def scanned_epoch(step: int, lineage: Lineage) -> int | None:
    """What `maker` says, by its definition."""
    return next((epoch for epoch, began in reversed(lineage) if began < step), None)


def scanned_in_lineage(version: WeightVersion, lineage: Lineage) -> bool:
    """What `in_lineage` says, by its definition."""
    for i, (epoch, began) in enumerate(lineage):
        if epoch == version.epoch:
            undone_after = lineage[i + 1][1] if i + 1 < len(lineage) else None
            return version.step >= began and (undone_after is None or version.step <= undone_after)
    return False


@pytest.mark.parametrize("seed", range(200))
def test_lineages_are_searched_as_their_definition_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    epochs = sorted(rng.choice(np.arange(1, 15), size=int(rng.integers(0, 10)), replace=False).tolist())
    lineage = tuple(zip(epochs, sorted(rng.integers(0, 8, size=len(epochs)).tolist()), strict=True))
    for epoch in range(16):
        assert until(epoch, lineage) == tuple(pair for pair in lineage if pair[0] <= epoch)
        for step in range(10):
            assert in_lineage(WeightVersion(epoch, step), lineage) == scanned_in_lineage(
                WeightVersion(epoch, step), lineage
            )
            assert epoch_of(step, lineage) == scanned_epoch(step, lineage)
