"""Runs and configurations of earlier versions hold keys that are gone."""

from __future__ import annotations

from typing import Any

import pytest

from shared import packages
from shared.config import apply_settings, load, validate
from shared.errors import ConfigError
from shared.removed_keys import REMOVED
from shared.run import pinned
from shared.run_config import run_model, sections
from volley.layout import PROJECT

CUSTOM = "orchestrator.generation.filters.custom"
QUICKSTART = PROJECT / "configs" / "quickstart.yaml"
TREE = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"env": "e"}}


def recorded(value: Any) -> dict[str, Any]:
    return pinned.relevant(validate(TREE).config) | {CUSTOM: value}


def test_removed_keys_are_gone_and_their_successors_are_not() -> None:
    known = pinned.relevant(validate(TREE).config)
    assert not known.keys() & REMOVED.keys()
    assert {one.successor for one in REMOVED.values()} <= known.keys()


@pytest.mark.parametrize("value", [[], None])
def test_a_removed_key_without_an_effect_is_no_setting_of_a_run(value: Any) -> None:
    now = pinned.relevant(validate(TREE).config)
    assert pinned.changes(recorded(value), now) == pinned.changes(now, recorded(value)) == []
    assert pinned.permitted(recorded(value), now, step=3) == []
    settings = ((1, recorded([])), (2, {CUSTOM: value, "trainer.max_steps": 7}))
    assert pinned.in_force(settings, 2) == now | {"trainer.max_steps": 7}
    assert apply_settings(validate(TREE).config, recorded(value)) == validate(TREE).config
    assert pinned.amended(((1, recorded(value)),), 2, now) == ((1, recorded(value)),)


def test_a_removed_key_with_an_effect_names_its_successor() -> None:
    now = pinned.relevant(validate(TREE).config)
    with pytest.raises(ConfigError, match=rf"records {CUSTOM}=\['my.rules:keeps'\].*trainer\.filters\.custom"):
        pinned.changes(recorded(["my.rules:keeps"]), now)
    with pytest.raises(ConfigError, match=r"trainer\.filters\.custom replaced it"):
        pinned.in_force(((1, recorded(["my.rules:keeps"])),), 1)


def test_a_configuration_may_hold_a_removed_key_without_an_effect() -> None:
    tree = TREE | {"orchestrator": {"max_turns": 2, "generation": {"filters": {"custom": [], "min_reward": 0.1}}}}
    found = validate(tree)
    assert found.config.orchestrator.generation.filters.min_reward == 0.1
    assert found.tree["orchestrator"] == {"max_turns": 2, "generation": {"filters": {"min_reward": 0.1}}}
    assert tree["orchestrator"]["generation"]["filters"]["custom"] == [], "the tree that was given is left alone"
    assert load([QUICKSTART], [f"{CUSTOM}=[]"]).config == load([QUICKSTART]).config
    with pytest.raises(ConfigError, match=rf"unknown key {CUSTOM}: trainer\.filters\.custom replaced it"):
        load([QUICKSTART], [f"{CUSTOM}=[my.rules:keeps]"])


def test_settings_of_a_package_that_is_not_installed_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    was = pinned.relevant(validate(TREE).config)
    found = packages.found
    lacking = {name for name, owner in packages.OWNERS.items() if owner == "volley-rl-supervised"}

    def without(group: str) -> Any:
        return {name: point for name, point in found(group).items() if name not in lacking}

    monkeypatch.setattr(packages, "found", without)
    cached = (run_model, sections, pinned.rules)
    for one in cached:
        one.cache_clear()
    try:
        now = pinned.relevant(validate(TREE).config)
        assert "sft.batch_size" in was.keys() - now.keys()
        with pytest.raises(ConfigError, match="belongs to the package volley-rl-supervised, which is not installed"):
            pinned.changes(was, now)
        with pytest.raises(ConfigError, match="belongs to the package volley-rl-supervised, which is not installed"):
            pinned.in_force(((1, was),), 1)
    finally:
        for one in cached:
            one.cache_clear()
