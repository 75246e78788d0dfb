"""Marks of turns are what `algorithm.credit: turn` reads; comparisons belong to the whole episode."""

from dataclasses import replace

import numpy as np
import pytest

from packages.judges.tests.test_judges import episode
from services.trainer.algorithms.terms.rewards import of_tokens, turn_of_tokens
from shared.types import ASSISTANT


def test_marks_are_at_the_ends_of_their_turns_and_a_comparison_is_the_outcome() -> None:
    plain, marks, rank = episode(0, "a", "bb", "c"), iter((0.1, 0.2, 0.3)), 0.75
    turns = tuple(replace(turn, reward=next(marks)) if turn.role == ASSISTANT else turn for turn in plain.turns)
    judged = replace(plain, turns=turns, reward=0.6 + rank)
    found, numbers = of_tokens(judged, "turn"), turn_of_tokens(judged)
    assert found.outcome == pytest.approx(rank)
    by_turn = [found.tokens[numbers == n].sum() for n in range(3)]
    assert by_turn == pytest.approx([0.1, 0.2, 0.3 + rank])
    assert np.flatnonzero(found.tokens).tolist() == [turn.end - 1 for turn in turns if turn.role == ASSISTANT]
