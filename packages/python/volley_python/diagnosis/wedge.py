"""Diagnose a run from its services' reports: what each waits for, and whether the run advances.

Waits are followed from service to service, up to one that is working, one that will not continue by itself (paused,
unreachable, broken), or one visited before: a cycle. Pure functions: reports in, sentences out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.services import SERVICES

QUIET_S, CYCLE_S, BUSY_S = 60.0, 15.0, 1800.0
"""Longest time without progress, in seconds: by default, in a cycle, and with a service at work.

A service at work may take any time for what others wait for: only its own reports count, such as the micro-batches of a
trainer or the tokens of an engine.
"""
FRESH_S = 5.0
"""A run that advanced within this many seconds is running."""
_OF_TRAINING = ("teacher", "judge")
"""Part that only episodes of training wait for."""
_AT_WORK = ("loading", "warm start", "starting", "training", "saving")

State = Literal["running", "waiting", "wedged", "finished", "failed", "stopped", "unknown"]


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """Report of one service.

    `error` is why it does not answer, `not_ready` what its /ready says and `waits_on` the party that names. `facts` is
    its own description: /status of the trainer, /runs of the orchestrator, `internal_state` and `weights` of a rollout
    server, or `unreadable`: why it may not be read. `tokens_per_s` is measured by asking twice; None if not measured.
    `external`: the service belongs to others, so this run's supervisor does not restart it.
    """

    name: str
    kind: str
    url: str = ""
    error: str | None = None
    not_ready: str | None = None
    waits_on: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_s: float | None = None
    external: bool = False


@dataclass(frozen=True, slots=True)
class WaitLink:
    """`on`: name, kind or address of the awaited party, possibly one without a report (redis, a disk)."""

    on: str
    what: str


@dataclass(frozen=True, slots=True)
class WaitNode:
    """Reasons why one service does not advance: waits, a halt (it will not continue by itself), or its work.

    `paused`: it was paused on request. `quiet_s`: time since it last reported progress in its work, in seconds; None if
    it does not say.
    """

    name: str
    kind: str
    url: str = ""
    waits: tuple[WaitLink, ...] = ()
    halted: str = ""
    busy: str = ""
    paused: bool = False
    quiet_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a run.

    `chain` holds sentences, from the waiting service to the root cause. `quiet_s` is the time since the run last
    advanced, in seconds; None if unknown.
    """

    state: State
    chain: tuple[str, ...] = ()
    cycle: bool = False
    quiet_s: float | None = None

    def __str__(self) -> str:
        return " ← ".join(self.chain)


def diagnose(seen: Sequence[ServiceReport]) -> Verdict:
    """Diagnose the state of a run from the reports of some or all services."""
    run = next((s.facts for s in seen if s.kind == "orchestrator" and s.facts), {})
    quiet_s = run.get("quiet_s")
    trainer = next((s.facts for s in seen if s.kind == "trainer"), {})
    if refused := trainer.get("refused"):
        return Verdict("failed", (f"the trainer has stopped: {refused}",), quiet_s=quiet_s)
    if run.get("state") in ("finished", "failed") and not (
        run.get("refused") and trainer
    ):  # a trainer that has restarted
        return Verdict(
            run["state"],
            (f"the run has {run['state']}: {run['reason']}",) if run.get("reason") else (),
            quiet_s=quiet_s,
        )
    if "trainer" in {s.kind for s in seen} and all(s.error is not None for s in seen):
        return Verdict("stopped", ("no service of the run answers",))
    core = [s for s in seen if s.kind in SERVICES and SERVICES[s.kind].run_key]
    if core and all(s.facts.get("unreadable") for s in core):
        return Verdict("unknown", tuple(f"{s.name} cannot be read: {s.facts['unreadable']}" for s in core))
    walk = _Walk(nodes(seen))
    busy = bool(walk.unseen) or any(node.busy for node in walk.nodes)
    limit = BUSY_S if busy else CYCLE_S if walk.cycle else QUIET_S
    excused = "trainer" in walk.unseen or any(node.paused for node in walk.nodes)
    if not excused and _silence(quiet_s, walk.nodes) >= limit:
        state: State = "wedged"
    elif walk.chain and not busy and (quiet_s is None or quiet_s >= FRESH_S):
        state = "waiting"
    else:
        state = "running"
    return Verdict(state, tuple(walk.chain), walk.cycle, quiet_s)


def diagnosed(facts: dict[str, Any]) -> dict[str, Any]:
    """Add to an orchestrator's description of its run the `chain` of waits that it can see, and whether it is wedged.

    Args: facts: the answer of GET /runs/NAME without these.
    """
    verdict = diagnose([ServiceReport("orchestrator", "orchestrator", facts=facts)])
    wedged = {"state": "wedged", "reason": str(verdict)} if verdict.state == "wedged" else {}
    return {**facts, **wedged, "chain": verdict.chain}


def _silence(quiet_s: float | None, found: Sequence[WaitNode]) -> float:
    """Return the seconds since the run advanced or a service at work reported progress; 0 if the run does not say."""
    reported = (node.quiet_s for node in found if node.busy and node.quiet_s is not None)
    return 0.0 if quiet_s is None else min(quiet_s, *reported, quiet_s)


def nodes(seen: Sequence[ServiceReport]) -> list[WaitNode]:
    """Return the node of each service, rollout servers included that only the orchestrator knows."""
    trainer = next((s.facts for s in seen if s.kind == "trainer"), {})
    run = next((s.facts for s in seen if s.kind == "orchestrator"), {})
    servers = {server["url"]: server for server in run.get("servers", ())}
    met = [s for s in seen if s.kind != "rollout"]
    met += [s for s in seen if s.kind == "rollout"]
    met += [ServiceReport(url, "rollout", url) for url in servers if url not in {s.url for s in met}]
    return [_node(s, trainer, servers.get(s.url, {})) for s in met]


class _Walk:
    """Follow the waits, the trainer's first, since all end there.

    `unseen` are awaited services without a report, which may be at work.
    """

    def __init__(self, found: Sequence[WaitNode]) -> None:
        order = list(SERVICES)
        self.nodes = sorted(found, key=lambda node: -order.index(node.kind) if node.kind in SERVICES else 1)
        self.chain: list[str] = []
        self.cycle, self.unseen = False, set[str]()
        self._visited: set[str] = set()
        for node in self.nodes:
            if node.waits or node.halted:
                self._follow(node, ())

    def _follow(self, node: WaitNode, path: tuple[str, ...]) -> None:
        if node.name in path:
            self.cycle = True
            return
        if node.name in self._visited:
            return
        self._visited.add(node.name)
        if node.halted:
            self.chain.append(f"{node.name} {node.halted}")
        elif node.busy and not node.waits:
            self.chain.append(f"{node.name} is {node.busy}")
        for link in node.waits:
            self.chain.append(f"{node.name} waits for {link.what}")
            targets = [target for target in self.nodes if link.on in (target.name, target.kind, target.url)]
            if link.on in ("trainer", "peer") and not targets:
                self.unseen.add(link.on)
            if link.on == "rollout" and not targets and not any(other.kind == "trainer" for other in self.nodes):
                self.unseen.add("trainer")  # servers register once they have its first weights
            for target in targets:
                self._follow(target, (*path, node.name))


def _node(seen: ServiceReport, trainer: Mapping[str, Any], server: Mapping[str, Any]) -> WaitNode:
    who = (seen.name, seen.kind, seen.url)
    if seen.error is not None:
        return WaitNode(*who, halted=f"{'(external) ' if seen.external else ''}does not answer: {seen.error}")
    if seen.kind == "trainer":
        return _trainer(who, seen.facts)
    if seen.kind == "orchestrator":
        return _orchestrator(who, seen.facts)
    if seen.kind == "rollout":
        return _rollout(who, seen, trainer, server)
    return WaitNode(*who, halted=f"is not ready: {seen.not_ready}" if seen.not_ready else "")


type _Who = tuple[str, str, str]


def _trainer(who: _Who, facts: Mapping[str, Any]) -> WaitNode:
    phase, waits = facts.get("phase", ""), facts.get("waits", ())
    if phase in ("done", "stopped"):
        return WaitNode(*who)
    if facts.get("refused"):
        return WaitNode(*who, halted=f"has stopped: {facts['refused']}")
    if facts.get("paused") and phase in ("paused", "waiting"):
        return WaitNode(*who, halted="is paused on request; POST /resume continues it", paused=True)
    busy = f"at work ({phase}, {facts.get('step')} of {facts.get('max_steps')} steps done)" if phase in _AT_WORK else ""
    quiet_s = facts.get("quiet_s")
    if not waits:
        return WaitNode(*who, busy=busy, quiet_s=quiet_s)
    return WaitNode(*who, waits=_links(waits), busy=busy if phase in ("training", "saving") else "", quiet_s=quiet_s)


def _links(waits: Sequence[Mapping[str, Any]]) -> tuple[WaitLink, ...]:
    """Merge waits for the same service: many calls may wait for it, each for something else."""
    first, found = dict[str, Mapping[str, Any]](), Counter(one["on"] for one in waits)
    for one in waits:
        first.setdefault(one["on"], one)
    return tuple(
        WaitLink(on, (one["why"] if on == "orchestrator" else _sentence(one)) + _and_more(found[on] - 1))
        for on, one in first.items()
    )


def _and_more(n: int) -> str:
    return f", and {n} more like it" if n else ""


def _sentence(wait: Mapping[str, Any]) -> str:
    return f"{wait['on']}: {wait['why']}"


def _orchestrator(who: _Who, facts: Mapping[str, Any]) -> WaitNode:
    if facts.get("state") == "paused":
        return WaitNode(*who, halted="is paused on request; POST /runs/NAME/resume continues it", paused=True)
    waits: list[WaitLink] = []
    episodes = facts.get("waits", {})
    if facts.get("disk"):
        waits.append(WaitLink("disk", f"disk: {facts['disk']}"))
    if n := episodes.get("server"):
        waits.append(
            WaitLink(
                "rollout",
                f"a rollout server it can use ({n} requests{'' if facts.get('servers') else ', none is known'})",
            )
        )
    if n := episodes.get("rollout"):
        waits.append(WaitLink("rollout", f"answers of rollout servers ({n} requests)"))
    if episodes.get("peer"):
        waits.append(WaitLink("peer", "another orchestrator of the run, which evaluates"))
    if n := episodes.get("env"):
        of = ", ".join(f"{k} of {env}" for env, k in (facts.get("waits_env") or {}).items())
        waits.append(WaitLink("env", f"the environment service ({n} episodes{': ' if of else ''}{of})"))
    if n := (facts.get("sessions") or {}).get("unclaimed"):
        waits.append(WaitLink("agent", f"external agents, which have not claimed {n} tasks (POST /v1/sessions)"))
    if n := episodes.get("teacher"):
        waits.append(WaitLink("teacher", f"the teacher ({n} episodes)"))
    if n := episodes.get("judge"):
        waits.append(WaitLink("judge", f"judges ({n} groups)"))
    if not waits and (waiting := facts.get("waiting")):
        waits.append(_held_elsewhere(facts) or WaitLink(waiting["on"], _sentence(waiting)))
    if (step := facts.get("evaluating_step")) is not None:
        waits = [
            link if link.on in _OF_TRAINING else WaitLink(link.on, f"{link.what}, to evaluate step {step}")
            for link in waits
        ]
    return WaitNode(*who, waits=tuple(waits))


def _held_elsewhere(facts: Mapping[str, Any]) -> WaitLink | None:
    """Return the wait for another orchestrator's tickets, if the trainer lacks only their groups."""
    queue = facts.get("queue") or {}
    n = queue.get("leased", 0) - facts.get("held", 0)
    if not queue.get("ready") or n <= 0 or queue["depth"] >= facts.get("groups_per_step", 0):
        return None
    return WaitLink(
        "leases", f"{n} tickets that another orchestrator holds; if it died, they are released when their leases expire"
    )


def _rollout(who: _Who, seen: ServiceReport, trainer: Mapping[str, Any], server: Mapping[str, Any]) -> WaitNode:
    engine, reason = seen.facts.get("internal_state") or {}, seen.not_ready or server.get("out")
    if engine.get("paused"):
        return WaitNode(*who, halted="is paused on request; POST /continue_generation continues it")
    if arriving := seen.facts.get("arriving"):
        return WaitNode(*who, busy=f"loading weights {arriving}")
    if reason and (seen.waits_on or server.get("waits_on")) == "trainer":
        if trainer.get("phase") in ("waiting", "training", "saving", "paused", "done"):
            return WaitNode(
                *who,
                halted=f"finds no weights, though the trainer has published step "
                f"{trainer.get('durable_step')}: {reason}",
            )
        return WaitNode(*who, waits=(WaitLink("trainer", f"the first weights ({reason})"),))
    if reason:
        return WaitNode(*who, halted=f"is not ready: {reason}")
    if (step := server.get("lacks_step")) is not None:
        if refused := seen.facts.get("refused"):
            return WaitNode(*who, halted=f"refuses weights {refused['version']} for good: {refused['reason']}")
        if trainer and int(trainer.get("durable_step") or 0) >= step:
            return WaitNode(
                *who, halted=f"has {server.get('version')} and has not loaded step {step}, which is published"
            )
        return WaitNode(*who, waits=(WaitLink("trainer", f"weights of step {step} (has {server.get('version')})"),))
    if server.get("obstacle"):
        return WaitNode(*who, halted=str(server["obstacle"]))
    n = engine.get("running", 0) + engine.get("queued", 0) or server.get("inflight", 0)
    if n and seen.tokens_per_s == 0:
        return WaitNode(*who, halted=f"has {n} requests and produces no tokens")
    return WaitNode(*who, busy=f"answering {n} requests" if n else "", quiet_s=0.0 if n and seen.tokens_per_s else None)
