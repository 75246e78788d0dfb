"""Loss masks of conversations whose chat template has `{% generation %}` blocks.

The reference is `apply_chat_template` of transformers with `return_assistant_tokens_mask`. It marks the whole
conversation, because a block may depend on the messages after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import takewhile

from tokenizers import Encoding


def mark_spans(encoding: Encoding, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Mark each token that has a character in a span with 1, all others with 0.

    If the last character of a span is several tokens, transformers marks the first of them; this marks all.
    """
    inside = bytearray()
    for begin, end in spans:
        inside.extend(bytes(max(end - len(inside), 0)))
        inside[begin:end] = b"\1" * (end - begin)
    return [int(1 in inside[first:after]) for first, after in encoding.offsets]


def transfer_marks(
    ids: Sequence[int], marks: Sequence[int], turns: Sequence[range], whole: Sequence[int], mask: Sequence[int]
) -> list[int]:
    """Transfer the `mask` of the `whole` conversation to the same tokens in `ids`.

    `whole` may lack tokens of a turn, because the template rewrites earlier turns. These keep their `marks`, unless the
    mask is 0 on all tokens of the turn that `whole` has.
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
