"""What a server tells of what it has comes out as it went in, and only of as many chunks as were asked about."""

import numpy as np
import pytest

from shared.errors import DecodeError
from shared.published.holding import Holding, size_of


@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 1001])
def test_it_comes_out_as_it_went_in(n):
    rng = np.random.default_rng(n)
    told = Holding(rng.random(n) < 0.5, rng.random(n) < 0.1)
    data = told.to_bytes()
    assert len(data) == size_of(n)
    found = Holding.from_bytes(data, n)
    assert all(np.array_equal(a, b) for a, b in zip(told, found, strict=True))
    assert found.has.dtype == np.bool_


def test_bits_are_from_the_highest_on_and_rows_begin_a_byte():
    told = Holding(np.array([1, 0, 0, 0, 0, 0, 0, 0, 1], np.bool_), np.array([0, 1, 0, 0, 0, 0, 0, 0, 0], np.bool_))
    assert told.to_bytes() == bytes([0b10000000, 0b10000000, 0b01000000, 0])


def test_in_another_order():
    told = Holding(np.array([1, 0, 0], np.bool_), np.array([0, 1, 0], np.bool_))
    found = told.in_order(np.array([2, 0]))
    assert found.has.tolist() == [False, True]
    assert found.pending.tolist() == [False, False]


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0\0", bytes(1000)])
def test_what_is_not_of_so_many_chunks_is_refused(data):
    with pytest.raises(DecodeError):
        Holding.from_bytes(data, 5)
