"""Campaigns that cannot prove anything say so."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.support import small_run
from tools.chaos import campaign, lineage
from tools.chaos.campaign import CampaignSpec
from tools.chaos.plan import Amounts


@pytest.mark.parametrize("minutes", [0.0, -1.0])
def test_no_minutes_of_faults_are_refused(tmp_path: Path, minutes: float):
    with pytest.raises(ConfigError, match="minutes"):
        campaign.real(CampaignSpec(1, Amounts(1, 0, 0), minutes, tmp_path), lambda _: None)
    assert not any(tmp_path.iterdir())


def test_the_configuration_is_the_projects_wherever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for path in (campaign._SIMULATED, campaign._REAL):
        found = campaign._load(path, CampaignSpec(1, Amounts(1, 0, 0), 1.0, Path("out")), "r").config
        assert Path(found.model.path).is_dir()
        assert found.run.folder == tmp_path / "out" / "r"


def test_what_differs_between_two_runs_is_told_with_its_step_and_tickets(tmp_path: Path):
    ours, same = (RunFolder(small_run.make(tmp_path / name / small_run.RUN)) for name in "ab")
    assert lineage.difference(ours, same) is None
    told = lineage.difference(ours, swapped(tmp_path / "c" / small_run.RUN))
    assert told is not None
    files, first, *untrained = told.split("; ")
    assert files.endswith("files differ from the run without faults, the first is optimizer/optimizer.count.npy")
    assert first == "from step 2 on, which trained other groups: [4, 6], without faults [6, 4]"
    assert untrained == ["2 tickets ended without training: 3 failed (Timeout), 5 stale (2 steps old)"]


def swapped(folder: Path) -> RunFolder:
    """The first two steps of the small run, groups of the second in another order."""

    async def script(trainer: small_run.Incarnation) -> None:
        trainer.feed(2, 1, 6, 4, version=WeightVersion(1, 0))
        await trainer.until(lambda status: status.durable_step == 2)

    small_run.write_config(folder)
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(small_run.Incarnation(folder, executor).run(script))
    return RunFolder(folder)
