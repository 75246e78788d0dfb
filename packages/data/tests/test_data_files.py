"""Rows of data files in the encodings and forms that other programs write."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from volley_data import data_files as module
from volley_data.data_files import rows
from volley_environments.gsm8k.data import read_problems

ROWS: list[dict[str, Any]] = [
    {"question": "1+1?", "answer": "2 #### 2"},
    {"question": "2+2? \u2028 \x85 ü 天 😀", "answer": "4 #### 4"},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
ARRAY = json.dumps(ROWS, ensure_ascii=False, indent=1)
FORMS = {
    "lines": LINES,
    "CRLF": LINES.replace("\n", "\r\n"),
    "blank lines": f"\n \r\n{LINES}\n \n",
    "no end": LINES.rstrip(),
    "array": ARRAY,
    "array on one line": json.dumps(ROWS, ensure_ascii=False),
    "array after blank lines": f"\n\n  {ARRAY}\n",
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")


def written(folder: Path, content: bytes, name: str = "a.jsonl") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-16-be"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_encoding_is_the_same_rows(tmp_path: Path, form: str, encoding: str, packed: bool):
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    content = mark + FORMS[form].encode(encoding)
    path = written(tmp_path, gzip.compress(content) if packed else content)
    assert [row for _, row in rows(path)] == ROWS
    assert len(read_problems(path)) == 2


def test_a_row_has_the_place_it_stands_at(tmp_path: Path):
    path = written(tmp_path, b'\n{"a": 1}\n\n[2]\n')
    assert list(rows(path)) == [(f"{path}, line 2", {"a": 1}), (f"{path}, line 4", [2])]
    path = written(tmp_path, b"[1, 2]")
    assert list(rows(path)) == [(f"{path}, record 1", 1), (f"{path}, record 2", 2)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (LINES.encode()[:-9], "line 2 is not JSON"),
        (ARRAY.encode()[:-9], "one array, is not JSON"),
        (LINES.encode("utf-16")[:-1], "cannot be read as text"),
        (LINES.replace("\u2028", "").replace("天 😀", "").encode("latin-1"), "line 2 is not JSON: .*UTF-8"),
        (gzip.compress(LINES.encode())[:-9], "cannot be unpacked"),
        (gzip.compress(LINES.encode()) + b"rest", "cannot be unpacked"),
        (bz2.compress(b"1"), "compressed with bzip2 .*unpack it"),
        (lzma.compress(b"1"), "compressed with xz"),
        (b"PK\x03\x04", "a zip file"),
        (b"PAR1....PAR1", "cannot be read: .*Parquet"),
        (gzip.compress(b"PAR1....PAR1"), "Parquet"),
        (json.dumps({"data": ROWS}, indent=1).encode(), "one JSON value, not one record per line"),
        (b'{"a": NaN}', "line 1 is not JSON"),
        (b'{"a": 1} {"b": 2}', r"line 1 is not JSON: [^:]*, at character 10 "),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, content: bytes, why: str):
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=why) as refused:
        list(rows(path))
    assert str(path) in refused.value.detail


def test_lines_and_arrays_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(module, "MAX_ARRAY_BYTES", 20)
    assert len(list(rows(written(tmp_path, b"[1, 2, 3,\n 4, 5]")))) == 5
    for content, why in (
        (b"[" + b"1, " * 9 + b"1]", "more than 20 bytes"),
        (b'"' + b"a" * 20, "line 1 has more than 10"),
    ):
        with pytest.raises(ConfigError, match=why):
            list(rows(written(tmp_path, content)))


def test_a_missing_file_is_named_with_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"No such file.*set data\.train"):
        list(rows(tmp_path / "none", "set data.train"))
