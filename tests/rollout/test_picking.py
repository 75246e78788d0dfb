"""Which chunk is pulled next, and of whom."""

import numpy as np

from services.rollout.weights.picking import ChunkPicker, Source
from shared.clients.chunks import WeightSource
from shared.published.holding import Holding


def bits(text: str) -> np.ndarray:
    return np.array([one == "1" for one in text], np.bool_)


def source(name: str, has: str | None = None, pending: str | None = None, **fields) -> Source:
    holding = None if has is None else Holding(bits(has), bits(pending or "0" * len(has)))
    return Source(name, WeightSource(f"http://{name}"), is_trainer=name == "trainer", holding=holding, **fields)


def picks(missing: str, *sources: Source, n: int = 1, now: float = 0.0) -> list[tuple[int, str]]:
    """Each pick is a transfer that goes on."""
    picker, found = ChunkPicker(bits(missing)), list[tuple[int, str]]()
    while len(found) < n and (picked := picker.pick(sources, now)) is not None:
        index, who = picked
        if who is not None:
            who.n_transfers += 1
        found.append((index, who.url if who else ""))
    return found


def test_the_trainer_alone_is_asked_in_the_order_that_is_given():
    assert picks("10111", source("trainer"), n=9) == [(i, "trainer") for i in (0, 2, 3, 4)]


def test_the_trainer_is_asked_first_for_what_no_other_has_or_is_pulling():
    assert picks("1111", source("trainer"), source("other", "1000", "0100")) == [(0, "other")]
    assert picks("1111", source("trainer"), source("other", "0000", "1100")) == [(2, "trainer")]


def test_who_does_least_for_us_is_asked():
    trainer, a, b = source("trainer"), source("a", "110000"), source("b", "001100")
    found = picks("111111", trainer, a, b, n=6)
    assert sorted(found) == [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "trainer"), (5, "trainer")]
    assert {who for _, who in found[:3]} == {"trainer", "a", "b"}


def test_the_trainer_is_spared_where_others_have_all_that_is_missing():
    found = picks("1111111", source("trainer"), source("other", "1111111"), n=7)
    assert [who for _, who in found] == ["other", "other", "other", "trainer", "other", "trainer", "other"]


def test_what_another_is_pulling_is_asked_of_the_trainer_at_last():
    assert picks("0110", source("trainer"), source("other", "0000", "0110"), n=2) == [(1, "trainer"), (2, "trainer")]


def test_of_whom_nothing_is_known_is_asked_after_the_trainer():
    assert picks("11", source("trainer"), source("other"), n=2) == [(0, "trainer"), (1, "other")]


def test_where_others_tell_nothing_they_are_asked_before_the_trainer():
    picked = ChunkPicker(bits("1"), have_reports=False).pick([source("trainer"), source("other")], 0.0)
    assert picked is not None
    assert picked[1] is not None
    assert picked[1].url == "other"


def test_who_is_left_out_or_rests_is_not_asked_and_what_who_is_left_out_has_does_not_count():
    left_out = source("other", "1110", avoided=5.0)
    assert picks("1111", source("trainer"), left_out, now=4.0) == [(0, "trainer")]
    resting = source("trainer", rests=5.0)
    assert picks("1111", resting, source("other", "0100"), now=4.0) == [(1, "other")]
    assert picks("1111", resting, source("other", "0100"), now=5.0, n=2)[-1] in {(0, "trainer"), (1, "other")}


def test_where_nobody_may_have_any_the_first_is_nobodys():
    assert picks("011", source("trainer", rests=9.0), source("other", "000"), n=2) == [(1, ""), (2, "")]


def test_a_chunk_is_picked_once_until_it_is_put_back():
    picker = ChunkPicker(bits("01"))
    assert picker.n_missing == 1
    assert picker.pick([source("trainer")], 0.0) is not None
    assert picker.pick([source("trainer")], 0.0) is None
    picker.put_back(1)
    assert picker.n_missing == 1
    picker.clear()
    assert picker.pick([source("trainer")], 0.0) is None


def test_what_a_source_lacks_is_known_only_where_it_told():
    assert source("other", "10").lacks(1)
    assert not source("other", "10").lacks(0)
    assert not source("other", "10").lacks(None)
    assert not source("other").lacks(0)
