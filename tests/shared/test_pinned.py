"""What pins a run: which settings may change, and what was in force when."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import LoadedConfig, validate
from shared.errors import ConfigError
from shared.run import pinned


def flat(**sections: Any) -> dict[str, Any]:
    return pinned.relevant(loaded(**sections).config)


def loaded(**sections: Any) -> LoadedConfig:
    return validate({"run": {"name": "r"}, "model": {"path": "m"}, "data": {"env": "e"}, **sections})


def test_every_key_has_a_rule_with_a_reason():
    assert all(pinned.rule_of(key).reason for key in flat())
    assert not any(key.startswith(pinned.IRRELEVANT) for key in flat())


def test_a_key_that_is_none_may_not_change():
    assert not pinned.rule_of("trainers.max_steps").may


def test_every_rule_is_the_first_for_some_key():
    assert {pinned.rule_of(key) for key in flat()} == set(pinned.rules())


def test_the_first_epoch_has_all_and_later_ones_what_they_changed():
    first, second = flat(), flat(trainer={"max_steps": 40})
    settings = pinned.amended((), 1, first)
    assert settings == ((1, first),)
    assert pinned.amended(settings, 2, first) == settings
    settings = pinned.amended(settings, 3, second)
    assert settings[1:] == ((3, {"trainer.max_steps": 40}),)
    assert pinned.in_force(settings, 2) == first
    assert pinned.in_force(settings, 3) == pinned.in_force(settings, 9) == second
    assert pinned.in_force(settings, 0) == first, "nothing had changed before the first entry"
    assert pinned.in_force((), 1) == {}


def test_what_may_change_is_listed():
    now = flat(
        trainer={"max_steps": 40, "optimizer_config": {"learning_rate": 1e-6}}, orchestrator={"eval_every_n_steps": 2}
    )
    assert [str(change) for change in pinned.permitted(flat(), now, step=20)] == [
        "orchestrator.eval_every_n_steps: null → 2",
        "trainer.max_steps: 10 → 40",
        "trainer.optimizer_config.learning_rate: 1e-05 → 1e-06",
    ]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"trainer": {"groups_per_step": 4}},
            r"trainer\.groups_per_step \(was 8, now 4\) may not change: it is the unit",
        ),
        ({"grpo_config": {"off_policy_steps": 3}}, r"off_policy_steps \(was 1, now 3\) may not change"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, r"temperature \(was 1\.0, now 0\.5\)"),
        ({"data": {"env": "e", "env_config": {"size": 5}}}, r"data\.env_config\.size \(was null, now 5\)"),
        ({"trainer": {"max_steps": 3}}, r"max_steps \(was 10, now 3\) may not change: 5 steps are already trained"),
        (
            {"algorithm": {"teacher_kl_coef": 0.1}, "services": {"orchestrator": {"teacher": {"url": "http://t"}}}},
            r"teacher_kl_coef \(was 0\.0, now 0\.1\) may not change: episodes on their way",
        ),
        ({"algorithm": {"beta": 0.1}}, r"beta \(was 0\.0, now 0\.1\) may not change: the KL term's reference"),
    ],
)
def test_what_may_not_change_is_refused_with_what_it_was_and_what_to_do(sections: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said) as raised:
        pinned.permitted(flat(), flat(**sections), step=5)
    assert "set " in raised.value.hint
    assert "run.name" in raised.value.hint


def test_a_teacher_may_count_for_more_and_be_asked_elsewhere():
    def taught(coef: float, url: str) -> dict[str, Any]:
        return flat(algorithm={"teacher_kl_coef": coef}, services={"orchestrator": {"teacher": {"url": url}}})

    found = pinned.permitted(taught(0.1, "http://a"), taught(0.5, "http://b"), step=5)
    assert found == [pinned.Change("algorithm.teacher_kl_coef", 0.1, 0.5)]


def test_a_warm_start_may_be_named_in_the_mode_or_not():
    sft = {"max_steps": 5}
    for was, now in (("rl", "sft+rl"), ("sft+rl", "rl")):
        found = pinned.permitted(flat(mode=was, sft=sft), flat(mode=now, sft=sft), step=5)
        assert found == [pinned.Change("mode", was, now)]
    with pytest.raises(ConfigError, match=r"mode \(was sft, now rl\) may not change"):
        pinned.permitted(flat(mode="sft", sft={"train": ["a"]}), flat(sft={"train": ["a"]}), step=5)


TAUGHT = {"teacher_kl_coef": 0.5}
TEACHER = {"orchestrator": {"teacher": {"url": "http://t"}}}


@pytest.mark.parametrize(
    "other", [{"name": "on_policy_distillation", "gamma": 0.5, **TAUGHT}, {"name": "reinforce_plus_plus", **TAUGHT}]
)
def test_an_algorithm_and_back_has_the_keys_of_the_one_in_force(other: dict[str, Any]):
    sections = [{"algorithm": one, "services": TEACHER} for one in (TAUGHT, other, TAUGHT)]
    flats, settings = [flat(**one) for one in sections], pinned.amended((), 1, flat(**sections[0]))
    for epoch in (2, 3):
        assert pinned.permitted(flats[epoch - 2], flats[epoch - 1], step=5)
        settings = pinned.amended(settings, epoch, flats[epoch - 1])
    assert [pinned.in_force(settings, epoch) for epoch in (1, 2, 3)] == flats


def test_a_critic_keeps_what_its_optimizer_has_a_state_of():
    """A record that is older than a key of its algorithm had the default of that key."""
    now = flat(algorithm={"name": "ppo"})
    newer = ("algorithm.critic_updates", "algorithm.critic_frozen")
    older = {key: value for key, value in now.items() if key not in newer}
    assert pinned.permitted(older, now, step=3) == []
    for key, value in (("critic_frozen", "attention"), ("critic_updates", 2), ("name", "sao")):
        with pytest.raises(ConfigError, match=key):
            pinned.permitted(now, flat(algorithm={"name": "ppo", key: value}), step=3)


def test_a_key_that_an_older_record_lacks_had_its_default():
    was = {key: value for key, value in flat().items() if key != "algorithm.beta"}
    assert pinned.changes(was, flat()) == []
    assert pinned.changes(was, flat(algorithm={"beta": 0.5})) == [pinned.Change("algorithm.beta", 0.0, 0.5)]


def test_a_key_that_is_not_recorded_any_more_is_no_difference():
    assert pinned.changes(flat() | {"data.sources": {}}, flat()) == []


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("configs/tiny", "/home/me/configs/tiny", True),
        ("./configs/../configs/tiny", "/home/me/configs/tiny", True),
        ("../tiny", "/home/tiny", True),
        ("configs/tiny", "/home/me/configs/small", False),
        ("/a/tiny", "/b/tiny", False),
        ("a/tiny", "tiny", False),
        (".", "/a", False),
        (None, "/a", False),
    ],
)
def test_a_relative_path_is_the_absolute_one_it_ends(a: Any, b: Any, same: bool):
    assert pinned.same_path(a, b) is same
    assert bool(pinned.changes({"data.train": a}, {"data.train": b})) is not same


@pytest.mark.parametrize("raw", [[[1]], [["1", {}]], [[1, []], [1, {}]], [[2, {}], [1, {}]], [[1, {"a": 1}], 7], 3])
def test_settings_that_are_none_are_refused(raw: Any):
    with pytest.raises((TypeError, ValueError)):
        pinned.parse(raw)


def test_a_run_without_a_date_may_get_one_and_no_other():
    first, dated, other = (
        flat(),
        flat(run={"name": "r", "date": "2024-07-26"}),
        flat(run={"name": "r", "date": "2024-07-27"}),
    )
    assert pinned.permitted(first, dated, step=3) == []
    with pytest.raises(ConfigError, match=r"run\.date"):
        pinned.permitted(dated, other, step=3)
