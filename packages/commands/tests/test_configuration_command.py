"""`volley config` and `volley doctor`."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import yaml

from shared.config import load
from shared.errors import ConfigError
from tests.support.committed import every_config
from tests.support.small_run import write_config
from volley.__main__ import parse_arguments
from volley.printing import json_output
from volley_commands import configuration, doctor

ROOT = Path(__file__).parents[3]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    parsed = parse_arguments(["config", "show", "--json", *arguments])
    with json_output():
        assert parsed.command(parsed) == 0
    return orjson.loads(capsys.readouterr().out)


def test_each_key_names_the_file_the_override_or_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_config(tmp_path / "r")
    over = tmp_path / "over.yaml"
    over.write_text("trainer: {max_steps: 7}\nalgorithm: {epsilon: 0.1}\n", encoding="utf-8")
    found = shown(capsys, "--config", str(base), "--config", str(over), "run.seed=5")
    assert found["trainer.max_steps"] == {"value": 7, "source": str(over)}
    assert found["algorithm.epsilon"] == {"value": 0.1, "source": str(over)}
    assert found["run.seed"] == {"value": 5, "source": "command line"}
    assert found["run.bucket"] == {"value": None, "source": "default"}
    assert found["model.path"]["source"] == str(base / "config.yaml")  # of a folder
    only = shown(capsys, "--config", str(base), "--config", str(over), "--set")
    assert "run.bucket" not in only
    assert only.keys() <= found.keys()


def test_a_wrong_configuration_is_refused_as_elsewhere(tmp_path: Path) -> None:
    parsed = parse_arguments(["config", "show", "--config", str(write_config(tmp_path / "r")), "trainer.max_stepz=1"])
    with pytest.raises(ConfigError):
        parsed.command(parsed)
    nothing = parse_arguments(["config", "show"])
    with pytest.raises(ConfigError, match="neither --config, --data nor --env is given"):
        nothing.command(nothing)


@every_config
def test_committed_configurations_fit_the_schema(path: Path) -> None:
    from jsonschema import Draft202012Validator

    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert load([path]).tree
    Draft202012Validator(configuration.schema()).validate(orjson.loads(orjson.dumps(tree, default=str)))


def test_doctor_names_each_check_once_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with json_output():
        code = doctor.run(parse_arguments(["doctor"]))
    found = orjson.loads(capsys.readouterr().out)
    names = [one["name"] for one in found]
    assert len(set(names)) == len(names)
    assert {"machine", "environment base", "Redis", "sandbox", "disk", "ports"} <= set(names)
    assert code == any(one["level"] == "problem" for one in found)
    assert all(one["fix"] for one in found if one["level"] == "problem")


def test_doctor_names_a_missing_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLLEY_VENVS", str(tmp_path))
    found = list(doctor._environments())
    assert [one.level for one in found] == ["problem"] * 3
    assert {one.fix for one in found} == {"make install"}
