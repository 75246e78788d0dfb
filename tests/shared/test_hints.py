"""Hints for keys of other projects name keys of Volley, and no key of Volley is taken for another's."""

from shared.config import _keys
from shared.hints import VERL_KEYS
from shared.run_config import run_model


def test_keys_of_verl_are_none_of_volley_and_lead_to_its_keys():
    known = _keys(run_model())
    assert not VERL_KEYS.keys() & known.keys()
    assert {*VERL_KEYS.values()} <= known.keys()
