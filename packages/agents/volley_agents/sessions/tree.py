"""Token-exact tree of one session: every node is the end of a sampled turn.

Invariants
- A node's tokens are its parent's, the context between both, and the sampled ids; none is ever computed again.
- A request continues the node with the longest prefix of its messages, under the same tools and template variables.
  Any other request begins a sequence of its own, for a reason that is counted.
- A node is added once it is durable, and never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from shared import codec, routing
from shared.types import VersionSpan
from volley_agents.sessions.messages import (
    ChatMessage,
    Digest,
    digest_of,
    has_reasoning,
    next_digest,
    root_digest,
)

type Reason = Literal["first", "other beginning", "other tools", "edited", "template"]
"""Why a request does not simply continue a turn: it is the session's first; its first message is new (a sub-agent, or
everything replaced); its first message is known under other tools or variables; its history was edited or compacted; or
the chat template writes its history otherwise than before.
A history that is edited after a recorded turn continues that turn, with the edited messages as context.
"""
ROOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One sampled turn.

    `number` is in order of the session, `parent` the node that it continues or ROOT. `context` int32 [c] are the ids
    between the parent's end and the sample, of messages whose first role is `role`; `ids` int32 [n] and `logprobs`
    float32 [n] are the sample; `versions` are positions in it. `digest` is that of the conversation up to the answer,
    `bare` the same without the answer's reasoning; `first` are those of its first message and of its tools. `draw`
    numbers the samples of one prompt. `reason` is set for a node that does not simply continue its parent.
    """

    number: int
    parent: int
    draw: int
    role: str
    context: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    finish: str
    digest: Digest
    bare: Digest
    first: tuple[Digest, Digest]
    reason: Reason | None = None
    routed_experts: np.ndarray | None = None

    def encode(self) -> bytes:
        """Encode the stored record."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        record["versions"] = [span.to_wire() for span in self.versions]
        if self.routed_experts is not None:
            record["routed_experts"] = routing.to_wire(self.routed_experts)
        return codec.pack(record)

    @classmethod
    def decode(cls, data: bytes) -> Node:
        """Raises DecodeError."""
        record = codec.unpack(data, "a recorded turn")
        record |= {
            "versions": tuple(map(VersionSpan.from_wire, record["versions"])),
            "first": tuple(record["first"]),
        }
        if "routed_experts" in record:
            record["routed_experts"] = routing.from_wire(record["routed_experts"])
        return cls(**record)


_FIELDS = (
    *("number", "parent", "draw", "role", "context", "ids", "logprobs", "finish", "digest", "bare", "first", "reason"),
)


class TreePosition(NamedTuple):
    """Position of a request in the tree.

    `node` is the node that it continues, if any, and `n_known` the number of messages up to there; `digest` is that of
    the whole request, `first` those of its first message and of its tools, `reason` why it starts a sequence.
    """

    node: Node | None
    n_known: int
    digest: Digest
    first: tuple[Digest, Digest]
    reason: Reason | None


@dataclass(slots=True)
class Tree:
    """Nodes of a session, by number."""

    nodes: dict[int, Node] = field(default_factory=dict[int, Node])
    _ends: dict[Digest, int] = field(default_factory=dict[Digest, int])
    _bare: dict[Digest, Digest] = field(default_factory=dict[Digest, Digest])
    _lengths: dict[int, int] = field(default_factory=dict[int, int])
    _firsts: dict[Digest, set[Digest]] = field(default_factory=dict[Digest, set[Digest]])

    def add(self, node: Node) -> None:
        """Add a durable node. Its parent must be here."""
        self.nodes[node.number] = node
        self._lengths[node.number] = self.start(node) + len(node.ids)
        self._ends[node.digest] = node.number
        if node.bare != node.digest:
            self._bare[node.bare] = node.digest
        first, tools = node.first
        self._firsts.setdefault(first, set()).add(tools)

    def find(self, messages: Sequence[ChatMessage], tools: Sequence[Any], variables: Mapping[str, Any]) -> TreePosition:
        """Find the position of a request."""
        at = start = root_digest(tools, variables)
        first = next_digest(b"", messages[0]), start
        best, n_known = None, 0
        for i, message in enumerate(messages):
            bare = message.get("role") == "assistant" and not has_reasoning(message)
            at = next_digest(at, message)
            if bare:
                at = self._bare.get(at, at)
            if (number := self._ends.get(at)) is not None:
                best, n_known = self.nodes[number], i + 1
        is_edited = any(message.get("role") == "assistant" for message in messages[n_known:])
        reason = self._reason(*first) if best is None else "edited" if is_edited else None
        return TreePosition(best, n_known, at, first, reason)

    def find_ids(self, ids: np.ndarray) -> TreePosition:
        """Find the position of a prompt of token ids, int32 [T]: the longest turn whose tokens are its prefix."""
        best: Node | None = None
        while (longer := self._continued(best, ids)) is not None:
            best = longer
        digest = digest_of("ids", ids.tobytes())
        reason = None if best is not None else "other beginning" if self.nodes else "first"
        return TreePosition(best, 0, digest, (digest, digest), reason)

    def _continued(self, node: Node | None, ids: np.ndarray) -> Node | None:
        """Return the longest turn right after `node` whose tokens come next in `ids`."""
        parent, start = (ROOT if node is None else node.number), self.length(node)
        return max(
            (
                one
                for one in self.nodes.values()
                if one.parent == parent
                and np.array_equal(np.concatenate([one.context, one.ids]), ids[start : self.length(one)])
            ),
            key=self.length,
            default=None,
        )

    def _reason(self, first: Digest, tools: Digest) -> Reason:
        if not self.nodes:
            return "first"
        known = self._firsts.get(first, set())
        return "edited" if tools in known else "other tools" if known else "other beginning"

    def start(self, node: Node) -> int:
        """Position in the whole sequence at which the node's sample starts."""
        return self._lengths.get(node.parent, 0) + len(node.context)

    def length(self, node: Node | None) -> int:
        """Number of tokens up to the node's end; 0 for the root."""
        return 0 if node is None else self._lengths[node.number]

    def n_routed(self, node: Node | None) -> int:
        """Number of positions up to the node's end, from the first on, with known experts."""
        return sum(len(one.routed_experts) for one in self.path(node) if one.routed_experts is not None)

    def path(self, node: Node | None) -> list[Node]:
        """Nodes from the start of the sequence to this one."""
        found = list[Node]()
        while node is not None:
            found.append(node)
            node = self.nodes.get(node.parent)
        return found[::-1]

    def ids(self, node: Node | None) -> np.ndarray:
        """Return int32 [T]: all ids up to the node's end."""
        parts = [part for one in self.path(node) for part in (one.context, one.ids)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def leaves(self) -> list[Node]:
        """Nodes that no other node continues, in the order in which they were sampled."""
        parents = {node.parent for node in self.nodes.values()}
        return [node for node in self.nodes.values() if node.number not in parents]

    def roots(self) -> Iterator[Node]:
        return (node for node in self.nodes.values() if node.parent == ROOT)
