"""Campaigns that cannot prove anything say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from tools.chaos import campaign
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
