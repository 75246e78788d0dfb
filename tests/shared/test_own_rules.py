"""Rules that a configuration names by a file or an import path: found, copied, pinned, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shared import own_rules
from shared.config import LoadedConfig, apply_settings, load, recorded, stored
from shared.errors import ConfigError
from shared.run import pinned
from volley.runs.record import claimed
from volley_python.folder import forks

TEXT = (
    'import jax.numpy as jnp\n\n\ndef loss(tokens):\n    """The loss: \'é\' # "x"."""\n    return -tokens.advantages\n'
)
TREE = {"model": {"path": "m"}, "data": {"env": "toy"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(TEXT, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**TREE, "run": {"dir": str(tmp_path)}}), encoding="utf-8")
    return tmp_path


def loaded(folder: Path, *overrides: str) -> LoadedConfig:
    return load([folder / "config.yaml"], overrides)


def loss_of(found: LoadedConfig) -> own_rules.OwnRule:
    return own_rules.parse(found.config.algorithm.model_dump()["loss"])


def test_a_configuration_holds_the_text_of_the_file(folder: Path):
    found = loaded(folder, "algorithm.loss=my_loss.py:loss")
    assert found.config.algorithm.name == "own"
    rule = loss_of(found)
    assert (rule.file, rule.function, rule.text) == ("my_loss.py", "loss", TEXT)
    assert str(rule) == f"my_loss.py:loss (sha256 {rule.sha256[:12]}…)"


def test_it_is_the_same_wherever_the_file_lies(folder: Path):
    (folder / "inner").mkdir()
    (folder / "inner/my_loss.py").write_text(TEXT, encoding="utf-8")
    (folder / "inner/config.yaml").write_text(
        yaml.safe_dump({**TREE, "algorithm": {"loss": "my_loss.py:loss"}}), encoding="utf-8"
    )
    here = loaded(folder, "algorithm.loss=my_loss.py:loss")
    assert loss_of(here) == loss_of(load([folder / "inner/config.yaml"]))
    (folder / "my_loss.py").unlink()
    assert loss_of(load([folder / "inner/config.yaml"])) == loss_of(here), "beside the configuration's file"
    assert loss_of(load([folder / "inner/config.yaml"])) == loss_of(
        loaded(folder, "algorithm.loss=inner/my_loss.py:loss")
    )


def test_a_module_is_a_rule_of_its_file(folder: Path):
    (folder / "pack/deep").mkdir(parents=True)
    for path in ("pack/deep/adv.py", "pack/__init__.py", "pack/deep/__init__.py"):
        (folder / path).write_text("raise SystemExit\ndef advantage(group): ...\n", encoding="utf-8")
    found = loaded(folder, "algorithm.advantage=pack.deep.adv:advantage").config.algorithm.model_dump()
    rule = own_rules.parse(found["advantage"])
    assert (rule.file, rule.function, found["loss"]) == ("pack.deep.adv", "advantage", None)


def test_the_runs_folder_goes_on_without_the_file(folder: Path):
    first = loaded(folder, "algorithm.loss=my_loss.py:loss")
    with claimed(first) as claim:
        (folder / "my_loss.py").unlink()
        text = claim.folder.config.read_text(encoding="utf-8")
        assert "  loss: |\n    # my_loss.py:loss sha256=" in text, "people can read it there"
        for again in (stored(claim.folder.path), recorded(claim.folder.config)):
            assert loss_of(again) == loss_of(first)


def test_a_text_that_is_not_that_of_its_digest_is_refused(folder: Path):
    found = loaded(folder, "algorithm.loss=my_loss.py:loss")
    path = folder / "changed.yaml"
    path.write_text(found.to_yaml().replace("-tokens", "+tokens"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the text of my_loss.py has the sha256 [0-9a-f]{64}, and not"):
        load([path])


@pytest.mark.parametrize(
    ("text", "named", "why"),
    [
        (TEXT, "my_loss.py", "names no function"),
        (TEXT, "my_loss.py:other", "defines no other at its top level; it defines loss"),
        ("class loss: ...\n", "my_loss.py:loss", "loss is a class, not a function"),
        ("async def loss(t): ...\n", "my_loss.py:loss", "loss is async, not a function"),
        ("from there import loss\n", "my_loss.py:loss", "defines no loss at its top level; it defines nothing"),
        (TEXT, "missing.py:loss", "does not exist"),
        (TEXT, "no_such_module:loss", "no package 'no_such_module'"),
        ("def loss(:\n", "my_loss.py:loss", "is not Python: invalid syntax"),
        ("def loss(t):\n    return '${x}'\n", "my_loss.py:loss", r"may not contain \$\{"),
        ("from . import other\ndef loss(t): ...\n", "my_loss.py:loss", "line 1 imports another file of its package"),
        ("import numpy, time\ndef loss(t): ...\n", "my_loss.py:loss", "line 1 imports time, but a rule may depend on"),
        ("from random import gauss\ndef loss(t): ...\n", "my_loss.py:loss", "imports random"),
        (f"def loss(t): ...\n#{'x' * own_rules.MAX_BYTES}", "my_loss.py:loss", "has more than 32768 bytes"),
    ],
)
def test_a_file_that_is_no_rule_is_refused_by_name(folder: Path, text: str, named: str, why: str):
    (folder / "my_loss.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as refused:
        loaded(folder, f"algorithm.loss={named}")
    assert f"algorithm.loss={named}" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.name=own"], "needs algorithm.loss or algorithm.advantage"),
        (["algorithm.name=dapo", "algorithm.loss=my_loss.py:loss"], "unknown key algorithm.loss"),
        (["algorithm.loss=my_loss.py:loss", "algorithm.epsilon=0.3"], "epsilon=0.3 has no effect: algorithm.loss"),
        (["algorithm.advantage=my_loss.py:loss", "algorithm.advantage_estimator=rloo"], "has no effect"),
        (["algorithm.advantage=my_loss.py:loss", "algorithm.credit=my_loss.py:loss"], "credit=my_loss.py:loss has no"),
        (["algorithm.name=gdpo", "algorithm.reward_components.a=1", "algorithm.credit=my_loss.py:loss"], "gdpo reads"),
        (["data.curriculum.custom=my_loss.py:loss", "data.curriculum.floor=0.2"], "floor=0.2 has no effect"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(folder: Path, overrides: list[str], why: str):
    with pytest.raises(ConfigError, match=why):
        loaded(folder, *overrides)


def test_a_changed_file_is_refused_during_a_run_and_accepted_by_a_fork(folder: Path):
    was = pinned.relevant(loaded(folder, "algorithm.loss=my_loss.py:loss").config)
    (folder / "my_loss.py").write_text(TEXT.replace("-tokens", "-2 * tokens"), encoding="utf-8")
    now = pinned.relevant(loaded(folder, "algorithm.loss=my_loss.py:loss").config)
    with pytest.raises(ConfigError, match=r"algorithm.loss \(was my_loss.py:loss \(sha256 \w+…\), now") as refused:
        pinned.permitted(was, now, step=3)
    assert refused.value.hint == "put the file back, or choose another run.name=…"
    assert "advantages" not in str(refused.value), "the text itself is not shown"
    (change,) = pinned.permitted(was, now, step=3, free=forks.FREE)
    assert change.key == "algorithm.loss"


@pytest.mark.parametrize("key", own_rules.KEYS)
def test_every_rule_is_copied_pinned_and_free_in_a_fork(folder: Path, key: str):
    def values(*overrides: str) -> dict[str, object]:
        return pinned.relevant(loaded(folder, *overrides).config)

    plain, was = values(), values(f"{key}=my_loss.py:loss")
    assert own_rules.parse(str(was[key])).text == TEXT
    (folder / "my_loss.py").write_text(f"{TEXT}# other\n", encoding="utf-8")
    now = values(f"{key}=my_loss.py:loss")
    for before, after in ((was, now), (plain, was), (was, plain)):
        with pytest.raises(ConfigError, match=rf"{key} \(was .* may not change: a run keeps the rules"):
            pinned.permitted(before, after, step=3)
        assert key in [change.key for change in pinned.permitted(before, after, step=3, free=forks.FREE)]


def test_a_word_is_no_rule(folder: Path):
    was, now = (pinned.relevant(loaded(folder, f"algorithm.credit={word}").config) for word in ("episode", "turn"))
    assert [change.key for change in pinned.permitted(was, now, step=3)] == ["algorithm.credit"]
    with pytest.raises(ConfigError, match=r"algorithm.credit=turns names no function") as refused:
        loaded(folder, "algorithm.credit=turns")
    assert refused.value.hint.startswith("choose episode or turn, or name a function")


def test_steps_of_an_earlier_epoch_have_its_rule(folder: Path):
    """As a fork of a run without a rule, or with another one, is replayed."""
    plain, own = loaded(folder).config, loaded(folder, "algorithm.loss=my_loss.py:loss").config
    for first, second in ((plain, own), (own, plain)):
        settings = pinned.amended(((1, pinned.relevant(first)),), 2, pinned.relevant(second))
        for epoch, config in ((1, first), (2, second)):
            for stored_config in (plain, own):
                assert apply_settings(stored_config, pinned.in_force(settings, epoch)).algorithm == config.algorithm
