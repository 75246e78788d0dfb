"""Compare a token's text on two servers, to check that an id is the same token in both vocabularies.

Servers write one token in several ways: decoded (" that"), as the vocabulary has it ("Ġthat", "▁that"), as bytes
("<0xE2>", "bytes:\\xe2"), and, where its bytes are a part of a character, as nothing, as U+FFFD, or, at the last part,
as the whole character.
"""

from __future__ import annotations

import re

from tokenizers.decoders import ByteLevel

_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_BYTES = re.compile(r"(?:<0x[0-9A-Fa-f]{2}>)+|bytes: ?(?:\\x[0-9A-Fa-f]{2})+")
_BYTE_LEVEL = ByteLevel()


def is_same(theirs: str, ours: str) -> bool | None:
    """Return whether two texts are of the same token; None if that is unknown, as for a part of a character.

    Args:
        theirs: as any server writes it.
        ours: decoded by our tokenizer, alone.
    """
    rest = "".join(ours.replace(_PARTIAL, "").split())
    if _PARTIAL in ours and not rest and not theirs.isascii():
        return None
    readings = _readings(theirs)
    found = {_reduced(reading.replace(_PARTIAL, "")) for reading in readings} - {""}
    if ours and ours in readings:
        return True
    if not found or not ours:
        return None
    if _PARTIAL in ours:
        return any(rest in one and not one.isascii() for one in found)
    return _reduced(ours) in found


def _readings(text: str) -> tuple[str, ...]:
    """Return the texts that a server may mean."""
    if _BYTES.fullmatch(text):
        return (bytes.fromhex("".join(re.findall("x(..)", text))).decode("utf-8", "replace"),)
    return text, text.replace("▁", " "), _BYTE_LEVEL.decode([text])


def _reduced(text: str) -> str:
    """Return the text without white space, which servers trim; of white space alone, its spaces as one."""
    return "".join(text.split()) or re.sub(" +", " ", text)
