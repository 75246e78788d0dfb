"""Trajectory of a session: its trunk, and a branch for every other sequence of its tree.

The trunk is the longest sequence from the first root. Each sampled token is stored once: a branch holds its tokens
after those that it shares with an earlier sequence. Samples of one request share its context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.orchestrator.episodes.recorder import PROMPT
from shared.sequences import add_span
from shared.types import ASSISTANT, Branch, Turn, VersionSpan
from volley_agents.sessions.tree import ROOT, Node, Tree


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """Sequences of a session: the trunk, whose first `prompt_len` tokens are its prompt, and the branches."""

    prompt_len: int
    trunk: Branch
    branches: tuple[Branch, ...]


def tokens_of(tree: Tree, reward: float) -> SessionTokens:
    """Return the sequences of a tree with at least one node. `reward` is that of the trunk's last turn."""
    trunk, *others = _ordered(tree)
    path = tree.path(trunk)
    made, leaves = {node.number: 0 for node in path}, [trunk]
    branches = list[Branch]()
    for leaf in others:
        branches.append(_branch(tree, leaf, made, leaves))
        leaves.append(leaf)
        made |= dict.fromkeys((node.number for node in tree.path(leaf) if node.number not in made), len(branches))
    first = _own(tree, path, 0, 0)
    turns = (*first.turns[:-1], replace(first.turns[-1], reward=reward))
    return SessionTokens(len(path[0].context), replace(first, turns=turns), tuple(branches))


def _ordered(tree: Tree) -> list[Node]:
    """Leaves, the trunk's first, the others in the order in which they were sampled."""
    leaves = tree.leaves()
    root = next(tree.roots())
    own = [leaf for leaf in leaves if tree.path(leaf)[0] is root]
    trunk = max(own, key=lambda leaf: (tree.length(leaf), -leaf.number))
    return [trunk, *(leaf for leaf in leaves if leaf is not trunk)]


def _branch(tree: Tree, leaf: Node, made: Mapping[int, int], leaves: Sequence[Node]) -> Branch:
    """Make the branch of a leaf. Args: made: the sequence that holds each node so far; leaves: of the sequences."""
    path = tree.path(leaf)
    own = [node for node in path if node.number not in made]
    first = own[0]
    parent, shared = made.get(first.parent, -1), tree.length(tree.nodes.get(first.parent))
    twin = _twin(tree, first, made)
    if twin is not None:
        parent, shared = made[twin.number], shared + len(first.context)
    n_routed = 0 if parent < 0 else min(shared, tree.n_routed(leaves[parent]))
    return replace(_own(tree, own, shared, n_routed), parent=parent)


def _twin(tree: Tree, node: Node, made: Mapping[int, int]) -> Node | None:
    """Return a node that is already in a sequence, sampled after the same ids."""
    return next(
        (
            other
            for number in made
            if (other := tree.nodes[number]).parent == node.parent
            and len(node.context)
            and np.array_equal(other.context, node.context)
        ),
        None,
    )


def _own(tree: Tree, nodes: Sequence[Node], shared: int, n_routed: int) -> Branch:
    """Return the tokens of consecutive nodes from position `shared` on, and the experts from `n_routed` on."""
    ids, mask, logprobs, routed = (list[np.ndarray]() for _ in range(4))
    versions, turns = list[VersionSpan](), list[Turn]()
    for node in nodes:
        start = tree.start(node)
        context = node.context[max(0, shared - (start - len(node.context))) :]
        if len(context):
            role = PROMPT if node.parent == ROOT else node.role
            turns.append(Turn(start - len(context), start, role))
        ids += [context, node.ids]
        mask += [np.zeros(len(context), np.uint8), np.ones(len(node.ids), np.uint8)]
        logprobs += [np.zeros(len(context), np.float32), node.logprobs]
        for span in node.versions:
            add_span(versions, span.moved(start))
        turns.append(Turn(start, start + len(node.ids), ASSISTANT))
        if node.routed_experts is not None:
            routed.append(node.routed_experts)
    known = n_routed - tree.n_routed(tree.nodes.get(nodes[0].parent))
    return Branch(
        parent=-1,
        shared=shared,
        token_ids=np.concatenate(ids),
        loss_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        versions=tuple(versions),
        turns=tuple(turns),
        routed_experts=np.concatenate(routed)[known:] if routed else None,
    )
