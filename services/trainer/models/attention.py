"""Which tokens a token sees, in rows that hold a sequence each and in rows that several share.

In a packed row the sequences lie one after the other, and what several of them begin with lies there once: they are a
trie in depth-first order, so those that hold a token are neighbours, and one number a token tells who sees it:

    position i sees position j where j <= i < visible_until[j]
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
    """Where sequences lie in rows that several share: int32 [B, T] each.

    positions: of a token in its own sequence. visible_until: the end of the last sequence that holds the token.
    sequences: the number of the token's sequence in its row, which means nothing for a token that several hold.
    """

    positions: jax.Array
    visible_until: jax.Array
    sequences: jax.Array


def positions(ids: jax.Array, packing: Packing | None) -> jax.Array:
    """int32 [1, T], or [B, T] where rows are packed, of ids [B, T]."""
    return jnp.arange(ids.shape[1])[None] if packing is None else packing.positions


def visible(ids: jax.Array, packing: Packing | None) -> jax.Array:
    """bool [1, T, T], or [B, T, T] where rows are packed: whether a position (second axis) sees another one (third), of
    ids [B, T]. Without packing every position sees all that is not after it: what fills rows up is on the right.
    """
    length = ids.shape[1]
    if packing is None:
        return jnp.tril(jnp.ones((length, length), bool))[None]
    column = jnp.arange(length)
    seen_from = column[:, None] < packing.visible_until[:, None, :]
    return seen_from & (column[None, :] <= column[:, None])
