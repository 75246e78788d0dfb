"""JSON descriptions of a session: for the agent that claims it, and for people."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from volley_agents.sessions.session import AgentSession
from volley_agents.sessions.tree import Node


def claimed_view(session: AgentSession, key: str, base_url: str, model: str) -> dict[str, Any]:
    """Describe a session for the agent that has claimed it."""
    record = session.record
    return {
        "id": record.id,
        "key": key,
        "base_url": base_url,
        "model": model,
        "env": record.env,
        "task": record.task,
        "ticket": record.ticket,
        "sample_index": record.sample_index,
        "messages": record.messages,
        "tools": record.tools,
        "judged": record.judged,
        "expires_at": session.expires,
    }


def session_view(session: AgentSession) -> dict[str, Any]:
    """Describe a loaded session: its state, and its tree as numbers of tokens."""
    record, tree = session.record, session.tree
    nodes = list(tree.nodes.values())
    return {
        "id": record.id,
        "state": session.state,
        "reason": session.reason,
        "ticket": record.ticket,
        "sample_index": record.sample_index,
        "env": record.env,
        "task": record.task,
        "agent": record.agent,
        "opened_at": record.opened,
        "expires_at": session.expires,
        "calls": session.n_calls,
        "limit": session.limit,
        "result": None if session.result is None else dataclasses.asdict(session.result),
        "sequences": len(tree.leaves()),
        "sampled_tokens": sum(len(node.ids) for node in nodes),
        "reasons": dict(Counter(node.reason for node in nodes if node.reason is not None)),
        "turns": [_turn(session, node) for node in nodes],
    }


def _turn(session: AgentSession, node: Node) -> dict[str, Any]:
    return {
        "number": node.number,
        "parent": node.parent if node.parent >= 0 else None,
        "reason": node.reason,
        "start": session.tree.start(node),
        "end": session.tree.length(node),
        "versions": sorted({span.version for span in node.versions}),
        "finish": node.finish,
    }
