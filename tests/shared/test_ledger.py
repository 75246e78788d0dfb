import pytest

from shared.errors import DecodeError
from shared.run import ledger
from shared.types import WeightVersion

VERSION = WeightVersion(1, 2)
LINE = ledger.line(7, "trained", VERSION, versions=(VERSION, VERSION), digest="0" * 64)


@pytest.mark.parametrize("line", [LINE, ledger.line(8, "failed", VERSION, reason="it, [broke]"), ledger.rollback(1, 2)])
def test_what_a_trainer_writes_is_read(line: ledger.Line) -> None:
    assert ledger.checked(dict(line)) == line


@pytest.mark.parametrize("line", [{**LINE, "x": None}, {**ledger.rollback(1, 2), "ticket": 7}, {**LINE, "rollback": 1}])
def test_a_line_that_says_more_than_a_ledger_is_none(line: ledger.Line) -> None:
    with pytest.raises(DecodeError):
        ledger.checked(line)


def test_a_line_of_many_values_is_none_however_they_are_hidden() -> None:
    """The later of two values of a key counts: the earlier one would have been made."""
    assert ledger.parse(b'{"rollback":[' + b"[]," * 1000 + b'[]],"rollback":1,"epoch":2}') is None
    assert ledger.parse(b'{"rollback":1,"epoch":2}') == ledger.rollback(1, 2)
