"""The wedge detector: each planted wedge is named with the one who keeps all waiting, and what moves is not called
wedged.
"""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import QueueUnavailable, ServiceUnreachable, StorageFull
from shared.files.storage import storage
from shared.process.ports import free_port
from shared.queue.client import connect
from shared.queue.queue import TicketQueue
from volley_python.diagnosis.wedge import BUSY_S, CYCLE_S, FRESH_S, QUIET_S, ServiceReport, diagnose, nodes

QUEUE = {"ready": True, "leased": 0, "depth": 0, "version": 12}
SERVER = {
    "url": "http://r0",
    "version": "e000003-s000012",
    "inflight": 0,
    "out": None,
    "obstacle": None,
    "lacks_step": None,
}
FULL = {"on": "trainer", "why": "the trainer has enough groups and has not finished a step yet"}
GROUPS = "groups: 1 of 8 are here"


def waits(on, why):
    return [{"on": on, "why": why}]


def trainer(**said):
    known = {"phase": "waiting", "waits": waits("orchestrator", GROUPS), "step": 12, "max_steps": 99}
    return ServiceReport("trainer", "trainer", facts=known | {"durable_step": 12} | said)


def orchestrator(server=None, quiet_s=QUIET_S, **said):
    known = {
        "state": "running",
        "waits": {},
        "waiting": None,
        "held": 0,
        "groups_per_step": 8,
        "quiet_s": quiet_s,
        "queue": QUEUE,
    }
    return ServiceReport("orchestrator", "orchestrator", facts=known | {"servers": [SERVER | (server or {})]} | said)


ROLLOUT = ServiceReport("rollout-0", "rollout", "http://r0")
ENV = ServiceReport("env", "env")
NEEDS_SERVER = {"waits": {"server": 6}}
BEHIND = {"version": "e000003-s000010", "lacks_step": 12, "obstacle": "has e000003-s000010, step 12 is needed"}

PAUSES = {
    "the trainer is paused": (
        [trainer(phase="paused", paused=True, waits=[]), orchestrator(waiting=FULL), ROLLOUT, ENV],
        ["trainer is paused on request; POST /resume continues it", f"orchestrator waits for trainer: {FULL['why']}"],
    ),
    "the run is paused": (
        [trainer(), orchestrator(state="paused"), ROLLOUT, ENV],
        [f"trainer waits for {GROUPS}", "orchestrator is paused on request; POST /runs/NAME/resume continues it"],
    ),
}
WEDGES = {
    "no rollout server": (
        [trainer(), orchestrator(servers=[], **NEEDS_SERVER), ENV],
        [
            f"trainer waits for {GROUPS}",
            "orchestrator waits for a rollout server it can use (6 requests, none is known)",
        ],
    ),
    "a rollout server that died": (
        [
            trainer(),
            orchestrator({"obstacle": "failed"}, **NEEDS_SERVER),
            replace(ROLLOUT, error="Connection refused"),
            ENV,
        ],
        [
            f"trainer waits for {GROUPS}",
            "orchestrator waits for a rollout server",
            "rollout-0 does not answer: Connection refused",
        ],
    ),
    "a server without weights": (
        [
            trainer(),
            orchestrator(**NEEDS_SERVER),
            replace(ROLLOUT, not_ready="no weights are published under w yet", waits_on="trainer"),
            ENV,
        ],
        [
            "trainer waits",
            "orchestrator waits",
            "rollout-0 finds no weights, though the trainer has published step 12: no weights",
        ],
    ),
    "a server that cannot load": (
        [
            trainer(),
            orchestrator(**NEEDS_SERVER),
            replace(ROLLOUT, not_ready="weights e000003-s000012 cannot be loaded: digest"),
            ENV,
        ],
        [
            "trainer waits",
            "orchestrator waits",
            "rollout-0 is not ready: weights e000003-s000012 cannot be loaded: digest",
        ],
    ),
    "a server that missed an update": (
        [trainer(), orchestrator(BEHIND, **NEEDS_SERVER), ROLLOUT, ENV],
        [
            "trainer waits",
            "orchestrator waits",
            "rollout-0 has e000003-s000010 and has not loaded step 12, which is published",
        ],
    ),
    "a server that refuses an update": (
        [
            trainer(),
            orchestrator(BEHIND, **NEEDS_SERVER),
            replace(ROLLOUT, facts={"refused": {"version": "e000003-s000012", "reason": "lm_head is wrong"}}),
            ENV,
        ],
        ["trainer waits", "orchestrator waits", "rollout-0 refuses weights e000003-s000012 for good: lm_head is wrong"],
    ),
    "the teacher is away": (
        [trainer(), orchestrator(waits={"teacher": 9}), ROLLOUT, ENV],
        ["trainer waits", "orchestrator waits for the teacher (9 episodes)"],
    ),
    "the teacher is away during an evaluation": (
        [trainer(), orchestrator(waits={"teacher": 9, "rollout": 2}, evaluating_step=4), ROLLOUT, ENV],
        [
            "trainer waits",
            "orchestrator waits for answers of rollout servers (2 requests), to evaluate step 4",
            "orchestrator waits for the teacher (9 episodes)",
        ],
    ),
    "no agent claims the tasks": (
        [trainer(), orchestrator(sessions={"running": 9, "unclaimed": 3}), ROLLOUT, ENV],
        ["trainer waits", "orchestrator waits for external agents, which have not claimed 3 tasks"],
    ),
    "the environment is away": (
        [trainer(), orchestrator(waits={"env": 9}), ROLLOUT, replace(ENV, error="Connection refused")],
        [
            "trainer waits",
            "orchestrator waits for the environment service (9 episodes)",
            "env does not answer: Connection refused",
        ],
    ),
    "an environment hangs": (
        [trainer(), orchestrator(waits={"env": 9}, waits_env={"slow@1": 8, "lake": 1}), ROLLOUT, ENV],
        ["trainer waits", "orchestrator waits for the environment service (9 episodes: 8 of slow@1, 1 of lake)"],
    ),
    "Redis is away": (
        [
            trainer(waits=waits("redis", "Redis did not answer: gone")),
            orchestrator(waiting={"on": "redis", "why": "Redis did not answer"}),
            ROLLOUT,
        ],
        ["trainer waits for redis: Redis did not answer: gone", "orchestrator waits for redis: Redis did not answer"],
    ),
    "leases of an orchestrator that died": (
        [trainer(), orchestrator(waiting=FULL, held=1, queue=QUEUE | {"leased": 9}), ROLLOUT, ENV],
        ["trainer waits", "orchestrator waits for 8 tickets that another orchestrator holds"],
    ),
    "a disk is full": (
        [
            trainer(phase="saving", waits=waits("disk", "no disk space under /runs: 0 MB free")),
            orchestrator(quiet_s=BUSY_S),
            ROLLOUT,
        ],
        ["trainer waits for disk: no disk space under /runs: 0 MB free"],
    ),
    "an engine that hangs": (
        [
            trainer(),
            orchestrator(waits={"rollout": 4}),
            replace(ROLLOUT, facts={"internal_state": {"running": 4, "output_tokens": 7}}, tokens_per_s=0.0),
        ],
        [
            "trainer waits",
            "orchestrator waits for answers of rollout servers (4 requests)",
            "rollout-0 has 4 requests and produces no tokens",
        ],
    ),
    "an engine that was paused": (
        [trainer(), orchestrator(waits={"rollout": 4}), replace(ROLLOUT, facts={"internal_state": {"paused": True}})],
        [
            "trainer waits",
            "orchestrator waits",
            "rollout-0 is paused on request; POST /continue_generation continues it",
        ],
    ),
}


@pytest.mark.parametrize("name", [*PAUSES, *WEDGES])
def test_a_planted_wedge_is_named_with_its_cause_and_what_is_paused_on_request_only_waits(name):
    seen, chain = (PAUSES | WEDGES)[name]
    verdict = diagnose(seen)
    assert verdict.state == ("waiting" if name in PAUSES else "wedged"), verdict
    assert len(verdict.chain) == len(chain), verdict.chain
    for sentence, expected in zip(verdict.chain, chain, strict=True):
        assert sentence.startswith(expected)
    assert not verdict.cycle


def test_an_evaluation_that_waits_for_weights_nobody_makes_is_a_cycle():
    behind = {"version": "e000003-s000003", "lacks_step": 5}
    seen = [
        trainer(durable_step=3),
        orchestrator(behind, quiet_s=CYCLE_S, evaluating_step=5, waits={"server": 3}),
        ROLLOUT,
    ]
    verdict = diagnose(seen)
    assert (verdict.state, verdict.cycle) == ("wedged", True)
    assert str(verdict) == (
        "trainer waits for groups: 1 of 8 are here ← "
        "orchestrator waits for a rollout server it can use (3 requests), to evaluate step 5 ← "
        "rollout-0 waits for weights of step 5 (has e000003-s000003)"
    )


def test_a_queue_that_is_full_because_the_trainer_is_slow_is_no_wedge_until_it_lasts_very_long():
    seen = [trainer(phase="training", waits=[]), orchestrator(waiting=FULL, quiet_s=QUIET_S * 2), ROLLOUT, ENV]
    verdict = diagnose(seen)
    assert verdict.state == "running"
    assert verdict.chain == (
        f"orchestrator waits for trainer: {FULL['why']}",
        "trainer is at work (training, 12 of 99 steps done)",
    )
    assert diagnose([seen[0], orchestrator(waiting=FULL, quiet_s=BUSY_S)]).state == "wedged"


@pytest.mark.parametrize("phase", ["loading", "warm start", "training", "saving"])
def test_a_trainer_whose_own_report_changes_is_at_work_however_long_it_takes(phase):
    waiting = orchestrator(waiting=FULL, quiet_s=BUSY_S * 3)
    assert diagnose([trainer(phase=phase, waits=[], quiet_s=BUSY_S - 1), waiting, ROLLOUT, ENV]).state == "running"
    assert diagnose([trainer(phase=phase, waits=[], quiet_s=BUSY_S), waiting, ROLLOUT, ENV]).state == "wedged"
    assert diagnose([waiting]).state == "running"  # its orchestrator alone cannot tell


@pytest.mark.parametrize(
    ("rollout", "state"),
    [
        (replace(ROLLOUT, facts={"internal_state": {"running": 4}}, tokens_per_s=0.5), "running"),
        (
            replace(ROLLOUT, facts={"arriving": "e000003-s000012"}, not_ready="no weights", waits_on="trainer"),
            "running",
        ),
        (replace(ROLLOUT, facts={"arriving": None}, not_ready="no weights", waits_on="trainer"), "wedged"),
    ],
    ids=["samples tokens", "loads weights", "does neither"],
)
def test_a_server_that_samples_or_loads_is_at_work(rollout, state):
    quiet_s = BUSY_S * 3 if rollout.tokens_per_s else BUSY_S - 1
    assert diagnose([trainer(), orchestrator(waits={"rollout": 4}, quiet_s=quiet_s), rollout, ENV]).state == state


def test_an_evaluation_behind_another_orchestrators_is_no_wedge_until_it_lasts_very_long():
    seen = [trainer(), orchestrator(waits={"peer": 1}, evaluating_step=5, quiet_s=QUIET_S * 2), ROLLOUT, ENV]
    verdict = diagnose(seen)
    assert verdict.state == "running"
    assert (
        verdict.chain[1]
        == "orchestrator waits for another orchestrator of the run, which evaluates, to evaluate step 5"
    )
    assert diagnose([seen[0], orchestrator(waits={"peer": 1}, quiet_s=BUSY_S)]).state == "wedged"


def test_servers_that_have_not_registered_may_wait_for_a_trainer_that_was_not_asked():
    """As the orchestrator sees a run whose trainer takes minutes to start."""
    assert diagnose([orchestrator(servers=[], quiet_s=QUIET_S, **NEEDS_SERVER)]).state == "running"


def test_a_trainer_that_was_not_asked_may_be_at_work():
    assert diagnose([orchestrator(waiting=FULL, quiet_s=QUIET_S * 2)]).state == "running"
    assert diagnose([orchestrator(waiting={"on": "redis", "why": "gone"}, quiet_s=QUIET_S)]).state == "wedged"


@pytest.mark.parametrize(
    ("said", "tokens_per_s"),
    [({"running": 4}, 50.0), ({"running": 4}, None)],
    ids=["tokens are made", "nobody has looked twice"],
)
def test_a_long_answer_is_no_wedge(said, tokens_per_s):
    answering = replace(ROLLOUT, facts={"internal_state": said}, tokens_per_s=tokens_per_s)
    assert diagnose([trainer(), orchestrator(waits={"rollout": 4}), answering]).state == "running"


def test_servers_wait_for_the_first_weights_while_the_trainer_warms_up():
    empty = replace(ROLLOUT, not_ready="no weights are published under w yet", waits_on="trainer")
    verdict = diagnose(
        [trainer(phase="warm start", waits=[], step=0), orchestrator(waiting=FULL, quiet_s=QUIET_S), empty]
    )
    assert verdict.state == "running"
    assert verdict.chain[1:] == (
        "trainer is at work (warm start, 0 of 99 steps done)",
        "rollout-0 waits for the first weights (no weights are published under w yet)",
    )


@pytest.mark.parametrize(
    ("quiet_s", "state"), [(0.0, "running"), (FRESH_S, "waiting"), (QUIET_S - 1, "waiting"), (QUIET_S, "wedged")]
)
def test_how_long_nothing_advanced_decides(quiet_s, state):
    assert diagnose([trainer(), orchestrator(servers=[], quiet_s=quiet_s, **NEEDS_SERVER)]).state == state


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_run_that_is_over_is_not_wedged(state):
    verdict = diagnose(
        [
            trainer(phase="done", waits=[]),
            orchestrator(state=state, reason="8 groups in a row failed", quiet_s=9e9),
        ]
    )
    assert verdict.state == state


def test_without_the_orchestrator_the_chain_still_names_it():
    verdict = diagnose([trainer(), ServiceReport("orchestrator", "orchestrator", error="Connection refused"), ROLLOUT])
    assert verdict.state == "waiting"
    assert verdict.chain == (f"trainer waits for {GROUPS}", "orchestrator does not answer: Connection refused")


def test_servers_that_only_the_orchestrator_knows_are_in_the_chain():
    assert [node.name for node in nodes([orchestrator(), ENV])] == ["orchestrator", "env", "http://r0"]
    verdict = diagnose([orchestrator({"out": "refused", "obstacle": "failed (refused)"}, **NEEDS_SERVER)])
    assert verdict.chain[-1] == "http://r0 is not ready: refused"


async def test_an_error_names_whom_the_trainer_waits_for(tmp_path: Path):
    with pytest.raises(QueueUnavailable) as away:
        await TicketQueue(connect(f"redis://127.0.0.1:{free_port()}"), "demo").state()
    with pytest.raises(StorageFull) as full, storage(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    other = ServiceUnreachable("http://env did not answer")
    assert [error.waits_on for error in (away.value, full.value, other)] == ["redis", "disk", None]


def test_a_run_of_which_nothing_answers_is_stopped_and_one_service_says_nothing_of_the_run():
    away = [replace(seen, facts={}, error="Connection refused") for seen in (trainer(), orchestrator(), ROLLOUT, ENV)]
    assert diagnose(away).state == "stopped"
    assert diagnose(away).chain == ("no service of the run answers",)
    assert diagnose(away[2:]).chain == (
        "rollout-0 does not answer: Connection refused",
        "env does not answer: Connection refused",
    )
    assert diagnose([*away[1:], trainer()]).state != "stopped"


def test_many_calls_that_wait_for_the_same_service_are_one_line():
    many = [*waits("env", "task 4 is not drawn yet"), *waits("env", "task 9 is not drawn yet"), *waits("redis", "away")]
    chain = diagnose([trainer(phase="warm start", waits=many), ENV]).chain
    assert "trainer waits for env: task 4 is not drawn yet, and 1 more like it" in chain
    assert not any("task 9" in line for line in chain)
