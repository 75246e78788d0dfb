"""Halves of surrogate pairs become U+FFFD where text enters; other text is left as it is."""

import json
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import DecodeError
from shared.text import well_formed, without_halves
from volley_data.data_files import rows

ANY_TEXT = st.text(st.characters(codec=None, categories=None) | st.sampled_from("\ud83d\ude00\udc00\\u"), max_size=20)


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("cut \ud83d", "cut \ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("é \U0001f600", "é \U0001f600"),
        (r"\ud83d", r"\ud83d"),
    ],
)
def test_text_is_mended(text: str, mended: str) -> None:
    assert well_formed(text) == mended
    assert codec.from_json(json.dumps([text]).encode(), errors="halves") == [mended]


@given(ANY_TEXT)
def test_json_is_mended_as_the_text_in_it(text: str) -> None:
    escaped = json.dumps({text: text}).encode()
    assert json.loads(without_halves(escaped)) == {well_formed(text): well_formed(text)}
    assert codec.from_json(escaped, errors="halves") == {well_formed(text): well_formed(text)}


def test_encoded_halves_are_mended_and_other_bytes_are_refused() -> None:
    raw = json.dumps("a \ud83d b", ensure_ascii=False).encode("utf-8", "surrogatepass")
    packed = msgpack.packb("a \ud83d b", unicode_errors="surrogatepass")
    assert codec.from_json(raw, errors="halves") == codec.unpack(packed, errors="halves") == "a \ufffd b"
    for errors in ("strict", "halves"):
        with pytest.raises(DecodeError):
            codec.from_json(b'"\xff"', errors=errors)
        with pytest.raises(DecodeError):
            codec.unpack(b"\xa1\xff", errors=errors)
    assert codec.from_json(b'"\xff"', errors="replace") == codec.unpack(b"\xa1\xff", errors="replace") == "\ufffd"


def test_rows_of_data_files_are_mended(tmp_path: Path) -> None:
    for name, text in (("lines.jsonl", r'{"a": "cut \ud83d"}'), ("array.json", r'[{"a": "cut \ud83d"}]')):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert [row for _, row in rows(tmp_path / name)] == [{"a": "cut \ufffd"}]


def test_what_volley_has_written_is_read_strictly() -> None:
    for data in (rb'"\ud83d"', b'"\xed\xa0\xbd"'):
        with pytest.raises(DecodeError):
            codec.from_json(data)
    with pytest.raises(DecodeError):
        codec.unpack(b"\xa3\xed\xa0\xbd")
