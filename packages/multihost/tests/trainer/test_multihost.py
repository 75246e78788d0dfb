"""The processes of one trainer among themselves: in step, whatever any of them meets, and never alone."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from services.trainer.backend.memory import described
from services.trainer.batches.batch import BatchLayout
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.options import ModelOptions
from services.trainer.publishing.publications import ModelToPublish, Publications
from shared import config
from shared.errors import ConfigError, Forbidden, NonFinite, ProcessesMissing, ProcessLost, StorageFull, VolleyError
from shared.process.ports import free_port
from shared.run import rule_files
from shared.run.checkpoint_files import ManifestLeaf
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.trainer.process import BATCH, TrainerProcess, producing
from tests.trainer.process import config as process_config
from tools.embedded_redis import embedded_server
from volley_launch.training.memory import MemoryEstimate
from volley_multihost.connection import PeerConnection, greet, welcome
from volley_multihost.options import GroupOptions, group_options
from volley_multihost.processes import Follower, Leader, follow, stream, together
from volley_multihost.publications import FollowingPublications, LeadingPublications

KEY = b"a service token of sixteen"


@dataclass
class Two:
    """Process 0, and process 1 in a thread, with what it was asked to do."""

    leader: Leader
    follower: Follower
    done: list[tuple[str, Any]] = field(default_factory=list)
    lost: list[VolleyError] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    saved: list[Any] = field(default_factory=list)

    def follow_saves(self, calls: Mapping[str, Callable[[Any], object]]) -> None:
        noting = {name: lambda given, name=name: self.saved.append(calls[name](given)) for name in calls}
        with suppress(ProcessLost), stream("saves"):
            follow(self.follower, noting)

    def note(self, error: VolleyError) -> None:
        self.lost.append(error)
        self.gone.set()


def options(port: int, **other: Any) -> GroupOptions:
    return replace(GroupOptions(2, 0, ("127.0.0.1", port), KEY, "settings"), **other)


@pytest.fixture
def two() -> Iterator[Callable[[Mapping[str, Callable[[Any], object]]], Two]]:
    with ExitStack() as stack:

        def made(calls: Mapping[str, Callable[[Any], object]]) -> Two:
            port, threads, joined = free_port(), list[threading.Thread](), threading.Event()
            leader = Leader(options(port), lambda error: pair.note(error))
            follower = Follower(options(port, process_id=1), lambda error: pair.note(error))
            pair = Two(leader, follower)
            stack.callback(leader.close)

            def work() -> None:
                noting = {name: lambda given, name=name: pair.done.append((name, calls[name](given))) for name in calls}
                with suppress(ProcessLost):
                    follower.join()
                    joined.set()
                    follow(follower, noting)

            threads.append(threading.Thread(target=work, daemon=True))
            threads[0].start()
            leader.assemble(wait_s=10)
            assert joined.wait(60)
            stack.callback(lambda: threads[0].join(60))
            stack.callback(leader.end)
            return pair

        yield made


def test_all_do_a_call_and_it_ends_when_all_have_done_it(two):
    pair = two({"double": lambda given: 2 * given["n"]})
    assert together(pair.leader, "double", {"n": 4}, lambda: "ours") == "ours"
    assert pair.done == [("double", 8)]
    assert pair.lost == []


def test_arrays_and_bytes_travel(two):
    pair = two({"take": lambda given: (given["array"].tolist(), given["payload"])})
    together(pair.leader, "take", {"array": np.arange(3, dtype=np.int32), "payload": b"\0" * 3_000_000}, lambda: None)
    assert pair.done == [("take", ([0, 1, 2], b"\0" * 3_000_000))]


def test_what_the_leader_decides_in_a_call_is_told(two):
    pair = two({"save": lambda given: pair.follower.receive_value()})
    together(pair.leader, "save", {}, lambda: pair.leader.send("value", value="e000001-s000004"))
    assert pair.done == [("save", "e000001-s000004")]


def test_after_an_error_of_the_leader_all_wait_for_the_next_call(two):
    def full() -> None:
        raise StorageFull("no space")

    pair = two({"save": lambda given: pair.follower.receive_value(), "step": lambda given: "made"})
    for _ in range(2):
        with pytest.raises(StorageFull):
            together(pair.leader, "save", {}, full)
        together(pair.leader, "step", {}, lambda: None)
    assert pair.done == [("step", "made")] * 2


def test_an_error_of_the_leader_after_the_other_had_ended_the_call(two):
    ended = threading.Event()

    def late() -> None:
        ended.wait(60)
        raise StorageFull("no space")

    pair = two({"save": lambda given: ended.set(), "step": lambda given: "made"})
    with pytest.raises(StorageFull):
        together(pair.leader, "save", {}, late)
    together(pair.leader, "step", {}, lambda: None)
    assert [name for name, _ in pair.done] == ["save", "step"]


def test_an_error_of_another_process_is_raised_by_the_leader(two):
    def refuse(given: object) -> None:
        raise NonFinite("loss is not finite")

    pair = two({"step": refuse, "next": lambda given: None})
    with pytest.raises(NonFinite, match="loss"):
        together(pair.leader, "step", {}, lambda: None)
    together(pair.leader, "next", {}, lambda: None)
    assert [name for name, _ in pair.done] == ["next"]


def test_a_call_of_another_thread_disturbs_none(two):
    """A checkpoint is written beside the steps."""
    begun, go_on = threading.Event(), threading.Event()

    def save(given: object) -> str:
        begun.set()
        return pair.follower.receive_value()

    def saving() -> None:
        with stream("saves"):
            together(pair.leader, "save", {}, lambda: go_on.wait(60) and pair.leader.send("value", value="folder"))

    pair = two({"step": lambda given: given["n"]})
    beside = threading.Thread(target=pair.follow_saves, args=({"save": save},), daemon=True)
    leading = threading.Thread(target=saving)
    beside.start()
    leading.start()
    assert begun.wait(60)
    for n in range(3):
        together(pair.leader, "step", {"n": n}, lambda: None)
    go_on.set()
    leading.join(60)
    assert pair.done == [("step", 0), ("step", 1), ("step", 2)]
    assert pair.saved == ["folder"]


def test_a_process_that_is_gone_is_noticed_at_once(two):
    pair = two({"step": lambda given: None})
    pair.follower.close()
    assert pair.gone.wait(60)
    assert isinstance(pair.lost[0], ProcessLost)
    assert "process 1" in str(pair.lost[0])


def test_a_leader_that_is_gone_is_noticed_at_once(two):
    pair = two({})
    pair.leader._there[1]._sock.shutdown(socket.SHUT_RDWR)
    assert pair.gone.wait(60)


def test_who_goes_after_the_end_is_not_lost(two):
    pair = two({"step": lambda given: None})
    pair.leader.end()
    pair.follower.close()
    assert not pair.gone.wait(0.3)


def test_the_leader_waits_for_all_and_can_be_asked_again():
    with closing(Leader(options(free_port(), n=3))) as leader:
        for _ in range(2):
            with pytest.raises(ProcessesMissing, match="process 1, 2 of the trainer's 3"):
                leader.assemble(wait_s=0.05)


def test_an_address_that_is_taken_is_said():
    port = free_port()
    with closing(Leader(options(port))), pytest.raises(ConfigError, match=f"coordinator_address=127.0.0.1:{port}"):
        Leader(options(port))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"process_id": 5}, "process_id=5"),
        ({"settings": "others"}, "its configuration differs"),
        ({"key": b"another token altogether"}, "token"),
    ],
)
def test_a_stranger_is_refused(other: dict[str, Any], reason: str):
    port = free_port()
    with closing(Leader(options(port))) as leader:
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                with pytest.raises(ProcessesMissing):
                    leader.assemble(wait_s=0.05)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            with pytest.raises(ConfigError, match=reason):
                Follower(options(port, **{"process_id": 1, **other})).join()
        finally:
            stop.set()
            thread.join()


def test_who_listens_has_to_know_the_token_too():
    ours, theirs = socket.socketpair()
    imposter = threading.Thread(target=lambda: _swallow(lambda: welcome(theirs, b"", lambda given: {})))
    imposter.start()
    with pytest.raises(Forbidden):
        greet(ours, KEY, {"process_id": 1, "settings": ""})
    imposter.join()


def _swallow(call: Callable[[], object]) -> None:
    with pytest.raises(Forbidden):
        call()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 64, b"\0" * 8, b""])
def test_garbage_at_the_door_is_turned_away(data: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((VolleyError, OSError)):
            welcome(theirs, KEY, lambda given: {})


def test_a_message_that_is_none_ends_the_connection():
    ours, theirs = socket.socketpair()
    lost: list[str] = []
    connection = PeerConnection(theirs, 1)
    connection.watch(lambda peer, reason: lost.append(reason))
    ours.sendall((3).to_bytes(8, "big") + b"\x01\x02\x03")
    assert connection.receive("calls", 10) is None
    assert "valid msgpack" in lost[0]
    ours.close()
    connection.close()


def test_a_disk_that_is_full_ends_the_publishing_and_not_the_gathering(two, tmp_path: Path):
    leaves = [ManifestLeaf(name, (4,), "float32") for name in "abc"]
    gathered: dict[str, list[str]] = {"ours": [], "theirs": []}

    def model(side: str) -> ModelToPublish:
        arrays = {n: lambda n=n: gathered[side].append(n) or np.zeros(4, np.float32) for n in "cab"}
        return ModelToPublish(leaves, arrays, {}, None)

    class Full(Publications):
        def publish(self, version, model):
            model.arrays["a"]()
            raise StorageFull("no space")

    version = WeightVersion(1, 1)
    pair = two({"publish": lambda given: others.publish(version, model("theirs"))})
    others = FollowingPublications(pair.follower)
    for own in (Full(tmp_path / "full", "r"), Publications(tmp_path / "published", "r")):
        ours = LeadingPublications(own, pair.leader)
        call = lambda ours=ours: ours.publish(version, model("ours"))  # noqa: E731
        if isinstance(own, Full):
            with pytest.raises(StorageFull):
                together(pair.leader, "publish", {}, call)
        else:
            assert together(pair.leader, "publish", {}, call).n_bytes == 48
    assert gathered == {"ours": [*"abc"] * 2, "theirs": [*"abc"] * 2}


def run_config(tmp_path: Path, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"model": {"path": "configs/models/tiny"}, "data": {"env": "frozen_lake"}}), encoding="utf-8"
    )
    return config.load([path], [f"run.dir={tmp_path}", *overrides]).config


TWO = ("services.trainer.num_processes=2", "trainer.mesh.shape=[4,1]")
AT = "services.trainer.coordinator_address=10.0.0.1:4000"


def test_which_process_this_is(tmp_path: Path):
    first = group_options(run_config(tmp_path, *TWO, AT))
    second = group_options(run_config(tmp_path, *TWO, AT, "services.trainer.process_id=1", "services.trainer.port=4"))
    assert (first.n, first.process_id, first.address) == (2, 0, ("10.0.0.1", 4000))
    assert replace(second, process_id=0) == first
    other = group_options(run_config(tmp_path, *TWO, AT, "trainer.max_steps=77"))
    assert other.settings != first.settings


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (TWO, "needs services.trainer.coordinator_address"),
        ((*TWO, AT, "trainer.mesh.shape=[3,1]"), "3 devices do not divide"),
        ((*TWO, AT, "mode=sft", "sft.max_steps=3"), "trained by one process"),
        ((*TWO, AT, "services.trainer.process_id=2"), "process_id=2 must be less than"),
        ((*TWO, "services.trainer.coordinator_address=here"), "is not HOST:PORT"),
        ((*TWO, "services.trainer.coordinator_address=here:0"), "is not HOST:PORT"),
    ],
)
def test_processes_that_cannot_be_are_refused(tmp_path: Path, overrides: tuple[str, ...], reason: str):
    with pytest.raises(ConfigError, match=reason):
        group_options(run_config(tmp_path, *overrides))


def test_what_is_planned_is_one_line():
    layout, memory = BatchLayout((16,), 8, 0), MemoryEstimate({"parameters": 3 << 20}, {}, {}, 0, 0)
    model = ModelOptions(Path(), "float32", "none", (4, 1), ("fsdp", "tp"), 0)
    assert described(model, layout, 16, memory) == (
        "mesh fsdp 4 x tp 1: 4 cpu devices; 3 MiB on each; 16 sequences a step, 8 a micro-batch"
    )
    packed = replace(layout, tokens=64, shards=4)
    assert described(model, packed, 16, memory).endswith("16 sequences a step, micro-batches of 64 tokens")


STEPS = 4
MESH = {"trainer__mesh": {"shape": [4, 1]}, "trainer__train_micro_batch_size": 4, "trainer__max_steps": STEPS}


def own_rules_of(folder: Path) -> dict[str, Any]:
    """A loss, a credit and a filter from files."""
    (folder / "rule.py").write_text("def keeps(group):\n    return int(group.episodes[0].ids.sum()) % 3 > 0\n", "utf-8")
    named = {
        "algorithm": {"loss": "examples/rules/vespo.py:loss", "credit": "examples/rules/discounted.py:credit"},
        "trainer": {"filters": {"custom": f"{folder}/rule.py:keeps"}},
    }
    made = rule_files.replaced(named, rule_files.resolved(named, Path.cwd()))
    return {"algorithm": {"name": "own", **made["algorithm"]}, "trainer__filters": made["trainer"]["filters"]}


def trained(folder: Path, n: int, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The lines of metrics and the last checkpoint's parameters of a run on four devices of `n` processes."""
    folder.mkdir()
    with ExitStack() as stack:
        queue = stack.enter_context(embedded_server(folder / "redis")).url
        address, made = f"127.0.0.1:{free_port()}", list[TrainerProcess]()
        for i in range(n):
            tree = process_config(folder, queue, free_port(), **MESH, **settings)
            if n > 1:
                tree["services"]["trainer"] |= {
                    "num_processes": n,
                    "process_id": i,
                    "coordinator_address": address,
                }
            place = folder / f"process-{i}"
            place.mkdir()
            made.append(TrainerProcess(tree, place, devices=None if n > 1 else 4))
            made[i].start()
            stack.callback(made[i].end)
        stack.enter_context(producing(queue, 4 * STEPS * BATCH))
        made[0].wait(lambda s: s["phase"] == "done")
        assert [one["phase"] for one in (made[-1].status(),)] == (["following"] if n > 1 else ["done"])
        for one in made:
            one.process.send_signal(signal.SIGTERM)
        assert [one.process.wait(60) for one in made] == [0] * n
    run = RunFolder(folder / "r")
    found = CheckpointFolders(run.checkpoints, "r", 3, OrbaxArrays()).newest()
    assert found is not None
    assert found.state.step == STEPS
    lines = [orjson.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return lines, {name: np.asarray(value) for name, value in found.params.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings_of", [lambda folder: {}, own_rules_of], ids=["grpo", "own rules"])
def test_two_processes_compute_what_one_does_on_as_many_devices(tmp_path: Path, settings_of: Any):
    """Up to the order in which gloo adds: the sums of a step over devices differ in their last bits."""
    settings = settings_of(tmp_path)
    (lines, params), (expected, reference) = (trained(tmp_path / str(n), n, **settings) for n in (2, 1))
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours["version"] == theirs["version"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-5)
    assert params.keys() == reference.keys()
    largest = np.max([np.abs(params[name] - reference[name]).max() for name in params])
    assert largest < 1e-4
