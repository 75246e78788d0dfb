"""Hints for names of other trainers lead to keys of Volley, and no key of Volley is taken for another's."""

from shared.config_mistakes import _keys
from shared.run_config import run_model
from volley_commands.foreign_names import _TABLES


def test_names_of_other_trainers_are_no_keys_of_volley_and_lead_to_its_keys():
    known = _keys(run_model())
    for table in _TABLES.values():
        assert not table.keys() & known.keys()
        settings = [text.partition(";")[0].partition("=")[0] for text in table.values()]
        assert {one for one in settings if " " not in one and not one.startswith("--")} <= known.keys()
