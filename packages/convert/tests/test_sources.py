"""Remarks on the weights of a GGUF file, by its name."""

from __future__ import annotations

import pytest

from volley_convert.sources import PACKAGED, note_of


@pytest.mark.parametrize(
    ("source", "bits"),
    [
        (PACKAGED["smollm2"].file, "4"),
        ("m-q8_0.gguf", "8"),
        ("m-IQ2_XS.gguf", "2"),
        ("m-F16.gguf", ""),
        ("Q4.gguf", ""),
    ],
)
def test_quantized_weights_are_named(source: str, bits: str) -> None:
    name = source.rpartition("/")[2]
    assert note_of(source) == (f"{name} has {bits}-bit weights, converted to bfloat16" if bits else "")
