"""Loss masks of conversations whose chat template marks with `{% generation %}` what is learned.

The reference is `apply_chat_template` of transformers with `return_assistant_tokens_mask`. It marks the conversation as
a whole, because a block may depend on what follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import takewhile

from tokenizers import Encoding


def in_spans(encoding: Encoding, spans: Iterable[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character in a span. Transformers takes of a last character that is several tokens
    the first one; here it is all of them.
    """
    inside = bytearray()
    for begin, end in spans:
        inside.extend(bytes(max(end - len(inside), 0)))
        inside[begin:end] = b"\1" * (end - begin)
    return [int(1 in inside[first:after]) for first, after in encoding.offsets]


def of_whole(
    ids: Sequence[int], marks: Sequence[int], turns: Sequence[range], whole: Sequence[int], mask: Sequence[int]
) -> list[int]:
    """The `mask` of the `whole` conversation on the same tokens in `ids`.

    Tokens of a turn that `whole` lacks, because the template rewrites earlier turns, keep their `marks` unless the mask
    leaves out all that it has of the turn.
    """
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, whole, strict=False)))
    found: list[int | None] = [*mask[:n], *[None] * (len(ids) - n)]
    matcher = SequenceMatcher(None, whole[n:], ids[n:], autojunk=False)
    for theirs, ours, size in matcher.get_matching_blocks():
        found[n + ours : n + ours + size] = mask[n + theirs : n + theirs + size]
    result = [one or 0 for one in found]
    for turn in turns:
        known = [found[i] for i in turn if found[i] is not None]
        for i in turn if any(known) or not known else ():
            result[i] = marks[i] if found[i] is None else result[i]
    return result
