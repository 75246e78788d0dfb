"""Files of a run, under arbitrary content: a result, or an error of the project, and nothing else."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from shared import codec
from shared.errors import ConfigError, DecodeError, VolleyError, WeightsError
from shared.queue.records import StreamEntry
from shared.routing import RoutingShape
from shared.run import archive, checkpoint_files, ledger, state
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.progress import TicketProgress
from shared.types import WeightVersion
from tests.fuzz.test_msgpack import GROUP
from tests.fuzz.values import EXAMPLES, JSON, WIRE, as_json, changed
from volley.reporting import jsonl
from volley.runs import addresses
from volley.runs import record as runs
from volley_python.diagnosis import observing

MANIFEST = orjson.loads(
    orjson.dumps(
        asdict(
            checkpoint_files.Manifest(
                run="r",
                version="e000001-s000002",
                base_version="e000001-s000001",
                step=2,
                kind="full",
                path="params",
                files=(checkpoint_files.ManifestFile("params/a", 1, "00"),),
                tree=(checkpoint_files.ManifestLeaf("a", (2, 3), "float32"),),
                model={"vocab_size": 512},
                probe=checkpoint_files.Probe((1, 2), (-0.5,)),
                created=1.0,
            )
        )
    )
)


@EXAMPLES
@given(changed(MANIFEST, JSON).map(as_json) | JSON.map(as_json) | st.binary(max_size=50))
def test_manifests(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / checkpoint_files.MANIFEST).write_bytes(data)
    with suppress(WeightsError):
        manifest = checkpoint_files.read_manifest(folder)
        manifest.weight_version  # noqa: B018
        with suppress(VolleyError):
            checkpoint_files.verify_files(folder, manifest)


STATE = orjson.loads(
    replace(state.initial_state(7), lineage=((1, 0),), reference="e000001-s000000", recent=({"ticket": 1},)).to_json(
        optimizer_files=[], seal=""
    )
)


@EXAMPLES
@given(
    changed(
        {**STATE, "done": [1, 2], "optimizer_files": [{"name": "optimizer/a", "size": 1, "blake3": "0"}]}, JSON
    ).map(as_json)
    | JSON.map(as_json)
)
def test_states(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / state.STATE).write_bytes(data)
    with suppress(WeightsError):
        found, files = state.read(folder)
        in_lineage(found.version, found.lineage)
        found.progress()
        found.to_json()
        with suppress(VolleyError):
            checkpoint_files.verify_files(
                folder,
                checkpoint_files.Manifest.from_json(orjson.dumps({**MANIFEST, "files": [asdict(f) for f in files]})),
            )


LINE = ledger.line(3, "trained", WeightVersion(1, 2), versions=(WeightVersion(1, 1), WeightVersion(1, 1)), digest="00")


@EXAMPLES
@given(
    st.lists(
        changed(LINE, JSON).map(as_json) | changed(ledger.rollback(1, 2), JSON).map(as_json) | st.binary(max_size=20),
        max_size=4,
    )
)
def test_ledger_lines(lines: list[bytes]) -> None:
    parsed = [one for one in map(ledger.parse, lines) if one is not None]
    for one in ledger.settled(parsed).values():
        assert ledger.same(one, one)


@EXAMPLES
@given(st.binary(max_size=60) | st.lists(JSON.map(as_json)).map(b"\n".join))
def test_json_lines(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(data + b"\n")
    assert all(isinstance(row, dict) for row in jsonl.read(path))


VERSION = WeightVersion(1, 2)


def read_archive(folder: Path, data: bytes) -> list[bytes]:
    path = archive.path_of(folder, VERSION)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return list(archive.read(folder, "r", VERSION))


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("archive")
    made = archive.Archive(folder, "r")
    archive.path_of(folder, VERSION).parent.mkdir(exist_ok=True)
    made.write(VERSION, [b"group one" * 20, b"group two" * 20])
    return archive.path_of(folder, VERSION).read_bytes()


@EXAMPLES
@given(data=st.data())
def test_damaged_archives(tmp_path_factory: pytest.TempPathFactory, archived: bytes, data: st.DataObject) -> None:
    """Cut short, or with changed bytes: never other groups than were written."""
    damaged = bytearray(archived[: data.draw(st.integers(0, len(archived)))])
    for _ in range(data.draw(st.integers(0, 2))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DecodeError):
        assert read_archive(tmp_path_factory.getbasetemp(), bytes(damaged)) == [b"group one" * 20, b"group two" * 20]


HEADER = {"schema": archive.SCHEMA, "run": "r", "version": str(VERSION), "n": 2}


@EXAMPLES
@given(changed(HEADER, WIRE), st.lists(WIRE, max_size=2))
def test_archives_with_other_content(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], values: list[Any]
) -> None:
    frames = b"".join(zstandard.compress(codec.pack(value)) for value in (header, *values))
    with suppress(DecodeError):
        assert len(read_archive(tmp_path_factory.getbasetemp(), frames)) == len(values)


RECORD = {
    "digest": "d",
    "seed": 1,
    "config": {"run.name": "r"},
    "versions": {"volley": "1"},
    "created": 1.0,
    "elapsed_s": 2.0,
    "finished": False,
}


@EXAMPLES
@given(changed(RECORD, JSON).map(as_json) | JSON.map(as_json) | st.binary(max_size=30))
def test_run_records(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = RunFolder(tmp_path_factory.getbasetemp())
    folder.record.write_bytes(data)
    record = runs.read_record(folder)
    if record is not None:
        assert all(isinstance(key, str) for key in record.config)
        assert isinstance(record.elapsed_s, float)


PROCESSES = {
    "urls": {"env": "http://127.0.0.1:1"},
    "token_files": {"viewer": None, "service": None, "admin": None},
    "ca_file": None,
}


@EXAMPLES
@given(changed(PROCESSES, JSON).map(as_json) | JSON.map(as_json) | st.binary(max_size=30))
def test_process_lists(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = RunFolder(tmp_path_factory.getbasetemp())
    folder.processes.write_bytes(data)
    with suppress(ConfigError):
        observing._services(addresses.read(folder))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\xc6" + (2**32 - 1).to_bytes(4, "big") + bytes(2**24), "damaged"),
        (b"\xc6" + (2**23).to_bytes(4, "big") + bytes(2**23), "damaged"),
        (b"\xc4\x00" * 2**22, "damaged"),
        (b"\x91" * 2**22, "damaged"),
        (b"\xdd\xff\xff\xff\xff" * 2**20, "damaged"),
    ],
)
def test_an_archive_that_holds_too_much_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, named: str
) -> None:
    """With groups of up to 1 MiB, a file of a few kB that unpacks to megabytes is refused in less than four."""
    monkeypatch.setattr(archive, "MAX_GROUP_BYTES", 2**20)
    data = zstandard.compress(codec.pack({**HEADER, "n": 1})) + zstandard.compress(content, 19)
    assert len(data) < 2**14
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=named):
            read_archive(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_group_too_large_for_the_archive_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.groups.group_buffer.MAX_GROUP_BYTES", 100)
    rules = AdmissionRules(
        "arrival", max_staleness=1, longest=64, vocab_size=512, group_size=4, routing=RoutingShape(2, 8, 3)
    )
    void = GroupBuffer(TicketProgress(), [(1, 0)], rules).offer(StreamEntry("1-0", 3, GROUP.encode(), 1))
    assert void is not None
    assert void.reason == "poison"
    assert "could not be archived" in void.detail
