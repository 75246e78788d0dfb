"""Tokens become text that only grows, and end at a stop string."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.types import VersionSpan
from tests.support.tokenizer import tiny_tokenizer
from volley_serving.dialects.decoding import AnswerDecoder, TokenDecoder, answered
from volley_serving.dialects.records import AnswerContent, Asked, Piece, Sampled, Sampling

TOKENIZER = tiny_tokenizer()
MESSAGES = ({"role": "user", "content": "?"},)


def sampled(ids, finish="length", matched=None):
    n = len(ids)
    return Sampled(np.array(ids, np.int32), np.zeros(n, np.float32), finish, matched, (VersionSpan("v", 0, n),))


def streamed(asked, ids, step):
    decoder = AnswerDecoder(TOKENIZER, asked)
    pieces = list[Piece]()
    for at in range(0, len(ids), step):
        pieces += decoder.add(ids[at : at + step])
    last, answer = decoder.end(sampled(ids))
    assert answer.content == "".join(piece.text for piece in [*pieces, *last] if isinstance(piece, AnswerContent))
    return answer.content


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.integers(1, 5))
def test_any_tokens_are_decoded_as_a_whole(ids, step):
    decoder = TokenDecoder(TOKENIZER, skip_special=False)
    parts = [decoder.add(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join([*parts, decoder.add([], last=True)]) == TOKENIZER.decode(ids)


def test_a_character_arrives_whole():
    ids = TOKENIZER.encode("a😀b")
    decoder = TokenDecoder(TOKENIZER, skip_special=False)
    parts = [decoder.add([token]) for token in ids]
    assert len(ids) > len("a😀b")
    assert [part for part in parts if part] == ["a", "😀", "b"]


@given(st.text(st.sampled_from("aB😀 "), max_size=20), st.integers(1, 3), st.sampled_from(["B", "aB", "a😀", "  "]))
def test_a_stop_string_ends_the_text_and_the_tokens(text, step, stop):
    ids, asked = TOKENIZER.encode(text), Asked(messages=MESSAGES, sampling=Sampling(stop=(stop, "")))
    answer = answered(TOKENIZER, asked, sampled(ids))
    assert answer.content == text.partition(stop)[0] == streamed(asked, ids, step)
    n = len(answer.sampled.ids)
    assert (answer.stop, answer.finish_reason) == ((stop, "stop") if stop in text else (None, "length"))
    assert answer.sampled.ids.tolist() == ids[:n]
    assert stop not in TOKENIZER.decode(ids[: n - 1]) or n == 0
    assert n == len(ids) or stop in TOKENIZER.decode(ids[:n])
    assert [(span.start, span.end) for span in answer.sampled.versions] == [(0, n)]


def test_a_token_that_ends_the_answer_is_no_text():
    ids, asked = [*TOKENIZER.encode("ab"), TOKENIZER.eos_id], Asked(messages=MESSAGES)
    assert (answered(TOKENIZER, asked, sampled(ids, "stop")).content, streamed(asked, ids, 1)) == ("ab", "ab")
    inside = [TOKENIZER.eos_id, *TOKENIZER.encode("a")]
    assert streamed(asked, inside, 1) == answered(TOKENIZER, asked, sampled(inside)).content == "<|im_end|>a"


def test_a_character_that_a_long_part_ends_in_arrives_whole():
    text = "word " * 100 + "😀b"
    ids = TOKENIZER.encode(text)
    for cut in range(len(ids) - 6, len(ids)):
        decoder = TokenDecoder(TOKENIZER, skip_special=False)
        parts = [decoder.add(ids[:cut]), *(decoder.add([token]) for token in ids[cut:])]
        assert "".join(parts) == text
