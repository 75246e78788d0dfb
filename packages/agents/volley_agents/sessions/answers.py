"""Record of an answered call, from which every dialect writes the same answer again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared import codec
from volley_agents.sessions.tree import Node, Tree
from volley_serving.dialects.records import Answered, Call, Head, Sampled, Usage


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Call number `number`: its answers, each with the node of its tokens."""

    number: int
    head: Head
    answers: Sequence[Answered]
    usage: Usage
    nodes: Sequence[Node]

    def encode(self) -> bytes:
        """Encode the stored record; the tokens are stored with the nodes."""
        rows = [_row(answer, node) for answer, node in zip(self.answers, self.nodes, strict=True)]
        head, usage = self.head, self.usage
        return codec.pack(
            {
                "number": self.number,
                "head": [head.model, head.version, head.id, head.created],
                "usage": [usage.prompt, usage.completion, usage.cached],
                "answers": rows,
            }
        )

    @classmethod
    def decode(cls, data: bytes, tree: Tree) -> RecordedCall:
        """Raises DecodeError."""
        record = codec.unpack(data, "a recorded call")
        nodes = [tree.nodes[row["node"]] for row in record["answers"]]
        answers = [_answered(row, node) for row, node in zip(record["answers"], nodes, strict=True)]
        return cls(record["number"], Head(*record["head"]), answers, Usage(*record["usage"]), nodes)


def _row(answer: Answered, node: Node) -> dict[str, Any]:
    return {
        "node": node.number,
        "content": answer.content,
        "reasoning": answer.reasoning,
        "calls": [[call.id, call.name, call.arguments] for call in answer.calls],
        "finish_reason": answer.finish_reason,
        "stop": answer.stop,
    }


def _answered(row: Mapping[str, Any], node: Node) -> Answered:
    calls = tuple(Call(*call) for call in row["calls"])
    return Answered(sampled_of(node), row["content"], row["reasoning"], calls, row["finish_reason"], row["stop"])


def sampled_of(node: Node) -> Sampled:
    """The sampled tokens of a node."""
    finish = "length" if node.finish == "length" else "stop"
    return Sampled(node.ids, node.logprobs, finish, versions=node.versions)
