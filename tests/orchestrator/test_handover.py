"""Records of an orchestrator with a folder of its own, handed to the trainer over HTTP."""

import asyncio
import shutil
from dataclasses import replace

import pytest

from services.orchestrator.mixture.log import MixtureLog
from services.orchestrator.schedule.handover import RecordHandover
from services.orchestrator.status import RunStatus
from shared.clients.trainer import TrainerClient
from shared.data_schema import DataSection
from shared.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    InputError,
    NotFound,
    RunIdMismatch,
    TooLarge,
    Unauthorized,
    VolleyError,
    WrongMethod,
)
from shared.process.ports import free_port
from shared.run.folder import RunFolder
from shared.run.mixture import MixtureChange, SplitSizes
from tests.support.asgi import served
from tests.support.records import records_app
from volley_proof.records.checks import RecordChecks


def folders(tmp_path):
    for name in ("own", "run"):
        (tmp_path / name).mkdir()
    return RunFolder(tmp_path / "own"), RunFolder(tmp_path / "run")


async def test_every_line_is_in_the_trainers_folder_once_and_in_order(tmp_path):
    own, run = folders(tmp_path)
    own.evals.write_bytes(b'{"step":0}\nbroken\n   \n{"step":2}\n{"step":')
    own.mixture.write_bytes(b'{"from_ticket":3}\n')
    run.evals.write_bytes(b'{"step":0}\n{"st')
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        handover = RecordHandover(trainer, own, RunStatus())
        await handover.finish()
        with own.evals.open("ab") as file:
            file.write(b'4}\n{"step":6}\n')
        await handover.finish()
        await RecordHandover(trainer, own, RunStatus()).finish()  # another process: all of it again
    lines = [line for line in run.evals.read_bytes().splitlines() if line.strip()]
    assert lines == [b'{"step":0}', b'{"step":2}', b'{"step":4}', b'{"step":6}']
    assert run.mixture.read_bytes() == own.mixture.read_bytes()
    assert not run.samples.exists()


async def test_a_trainer_whose_folder_was_lost_gets_every_line_again(tmp_path):
    own, run = folders(tmp_path)
    own.evals.write_bytes(b'{"step":0}\n{"step":2}\n')
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        handover = RecordHandover(trainer, own, RunStatus())
        await handover.follow("b")
        await handover.finish()
        run.evals.write_bytes(b'{"step":0}\n')  # as it was filled again
        await handover.finish()
        assert run.evals.read_bytes() == b'{"step":0}\n'
        await handover.follow("b")  # a new epoch
        await handover.finish()
    assert run.evals.read_bytes() == own.evals.read_bytes()


async def test_a_record_that_is_removed_while_it_is_handed_over_begins_again(tmp_path):
    own, run = folders(tmp_path)
    own.evals.write_bytes(b'{"step":0}\n{"step":2}\n')
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        handover = RecordHandover(trainer, own, RunStatus())
        await handover.finish()
        own.evals.unlink()
        await handover.finish()
        own.evals.write_bytes(b'{"step":4}\n')
        await handover.finish()
    assert run.evals.read_bytes() == b'{"step":0}\n{"step":2}\n{"step":4}\n'


async def test_a_folder_of_both_keeps_its_lines_as_they_are(tmp_path):
    _, run = folders(tmp_path)
    text = b"".join(b'{"step":%d}\n' % i for i in range(3))
    run.evals.write_bytes(text)
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        await RecordHandover(trainer, run, RunStatus()).finish()
    assert run.evals.read_bytes() == text


async def test_many_lines_go_in_several_requests(tmp_path):
    own, run = folders(tmp_path)
    own.samples.write_bytes(b"".join(b'{"step":%d,"text":"%s"}\n' % (i, b"x" * 300_000) for i in range(9)))
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        await RecordHandover(trainer, own, RunStatus()).finish()
    assert run.samples.read_bytes() == own.samples.read_bytes()


async def test_a_trainer_that_is_away_is_waited_for(tmp_path):
    own, run = folders(tmp_path)
    own.evals.write_bytes(b'{"step":0}\n')
    port, status = free_port(), RunStatus()
    async with TrainerClient(f"http://127.0.0.1:{port}") as trainer:
        task = asyncio.create_task(RecordHandover(trainer, own, status).finish())
        while not (status.waiting and "not handed over" in status.waiting.why):
            await asyncio.sleep(0.01)
        async with served(records_app(run.path), port=port):
            await asyncio.wait_for(task, 60)
    assert status.waiting is None
    assert run.evals.read_bytes() == own.evals.read_bytes()


@pytest.mark.parametrize("refusal", [Unauthorized, Forbidden, NotFound, WrongMethod, Conflict, TooLarge])
async def test_a_line_is_sent_again_after_a_refusal_that_is_not_of_the_line(tmp_path, refusal):
    own, run = folders(tmp_path)
    own.evals.write_bytes(b'{"step":0}\n{"step":2}\n')
    app, status, refuses = records_app(run.path), RunStatus(), True

    def check_open():
        if refuses:
            raise refusal("not now")

    app.state.records = replace(app.state.records, check_open=check_open)
    async with served(app) as url, TrainerClient(url) as trainer:
        task = asyncio.create_task(RecordHandover(trainer, own, status).finish())
        while not task.done() and not (status.waiting and "not handed over" in status.waiting.why):
            await asyncio.sleep(0.01)
        refuses = False
        await asyncio.wait_for(task, 60)
    assert run.evals.read_bytes() == own.evals.read_bytes()


async def test_the_trainer_refuses_what_is_no_line(tmp_path):
    _, run = folders(tmp_path)
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        for line in ("[]", "{", '{"a":\n1}', "\ud800"):
            with pytest.raises(VolleyError):
                await trainer.post("/records/evals", {"lines": [line.encode(errors="replace").decode()]})
        with pytest.raises(VolleyError):
            await trainer.post("/records/ledger", {"lines": ["{}"]})
    assert not run.evals.exists()


async def test_a_folder_without_records_accepts_any_run_id(tmp_path):
    """The queue holds the run's earlier id until the trainer opens its own."""
    own, run = folders(tmp_path)
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        handover = RecordHandover(trainer, own, RunStatus())
        await handover.follow("earlier")
        await handover.follow("this")
        own.evals.write_bytes(b'{"step":0}\n')
        await handover.follow("this")
        with pytest.raises(RunIdMismatch):
            await RecordHandover(trainer, own, RunStatus()).follow("earlier")
    assert not (own.published / "beginning").exists()


async def test_records_of_another_run_id_are_not_handed_over(tmp_path):
    """The trainer's folder was emptied, the orchestrator's was not."""
    own, run = folders(tmp_path)
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        await RecordHandover(trainer, own, RunStatus()).follow("first")
        own.evals.write_bytes(b'{"step":0}\n')
        again = RecordHandover(trainer, own, RunStatus())
        watching = asyncio.create_task(again.watch())
        with pytest.raises(RunIdMismatch, match="another run id"):
            await again.follow("second")
        watching.cancel()
        assert not run.evals.exists()
        same = RecordHandover(trainer, own, RunStatus())
        await same.follow("first")
        await same.finish()
    assert run.evals.read_bytes() == own.evals.read_bytes()


async def none_issued() -> int:
    return 0


def lost(own: RunFolder) -> RunFolder:
    shutil.rmtree(own.path)
    return own


async def test_a_folder_that_was_lost_gets_back_what_the_trainer_has(tmp_path):
    """What a ticket plays follows from the mixture's lines."""
    own, run = folders(tmp_path)
    change = replace(MixtureChange(1, {"a": 1}), from_ticket=4, weights={"b": 1}, sizes={"b": SplitSizes(9, 9)})
    own.mixture.write_bytes(change.encode())
    own.samples.write_bytes(b"".join(b'{"step":%d,"text":"%s"}\n' % (i, b"x" * 300_000) for i in range(9)))
    kept = own.samples.read_bytes()
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        before = RecordHandover(trainer, own, RunStatus())
        await before.restore()
        await before.follow("b")
        await before.finish()
        with run.samples.open("ab") as file:
            file.write(b'{"torn')
        for left in (False, True):
            lost(own)
            if left:
                own.path.mkdir()
                (own.path / f".{own.samples.name}.arriving").write_bytes(b"of one that was killed")
            after = RecordHandover(trainer, own, RunStatus())
            await after.restore()
            assert (own.samples.read_bytes(), own.mixture.read_bytes()) == (kept, change.encode())
            assert not own.evals.exists()
        log = MixtureLog(own.mixture, {"a": 1}, none_issued)
        assert [(await log.drawn(ticket)).env for ticket in (3, 4, 7)] == ["a", "b", "b"]
        await after.follow("b")
        own.mixture.unlink()
        await after.restore()
        assert not own.mixture.exists(), "a folder that knows its run id was not lost"


async def test_a_trainer_that_is_away_is_waited_for_by_a_folder_that_knows_nothing(tmp_path):
    """Also where the queue is as new as the folder: the trainer may have been filled from its bucket."""
    own, run = folders(tmp_path)
    run.mixture.write_bytes(b'{"from_ticket":3}\n')
    port, status = free_port(), RunStatus()
    before = status.waiting
    async with TrainerClient(f"http://127.0.0.1:{port}") as trainer:
        task = asyncio.create_task(RecordHandover(trainer, own, status).restore())
        while not (status.waiting and "trainer's records" in status.waiting.why):
            await asyncio.sleep(0.01)
        assert not own.mixture.exists()
        async with served(records_app(run.path), port=port):
            await asyncio.wait_for(task, 60)
    assert status.waiting == before
    assert own.mixture.read_bytes() == run.mixture.read_bytes()


async def test_a_record_that_appears_while_it_is_fetched_stays(tmp_path):
    """A folder of both, which the trainer fills."""
    _, run = folders(tmp_path)

    class Filling(TrainerClient):
        async def record(self, record, offset):
            found = await super().record(record, offset)
            if not offset and record == "mixture":
                run.mixture.write_bytes(b'   \n{"from_ticket":3}\n')
                return ['{"from_ticket":3}'], 18
            return found

    async with served(records_app(run.path)) as url, Filling(url) as trainer:
        await RecordHandover(trainer, run, RunStatus()).restore()
    assert run.mixture.read_bytes() == b'   \n{"from_ticket":3}\n'
    assert [path.name for path in run.path.iterdir()] == ["mixture.jsonl"]


async def test_a_page_of_a_record_is_bounded(tmp_path):
    _, run = folders(tmp_path)
    run.evals.write_bytes(b"{}\n" * 25_000 + b"\n[]\n\xff\n" + b'{"a":"%s"}\n' % (b"x" * 1_040_000))
    async with served(records_app(run.path)) as url, TrainerClient(url) as trainer:
        sizes, offset = list[int](), 0
        while (found := await trainer.record("evals", offset))[1] > offset:
            lines, offset = found
            sizes.append(len(lines))
        assert sizes == [10_000, 10_000, 5_000, 1]
        assert await trainer.record("evals", 2**32) == ([], 2**32)
        for nowhere in (-1, 2**32 + 1, 2**60):
            with pytest.raises(InputError):
                await trainer.record("evals", nowhere)
        run.samples.mkdir()
        with pytest.raises(ConfigError, match="Is a directory"):
            await trainer.record("samples", 0)


async def test_a_mixture_that_names_an_unknown_environment_is_not_believed(tmp_path):
    _, run = folders(tmp_path)
    asked = []

    async def versions(name):
        asked.append(name)
        if name != "adder@2":
            raise NotFound(f"there is no environment {name}")

    app = records_app(run.path)
    checks = RecordChecks(run, "r", DataSection(env="toy"), versions)
    app.state.records = replace(app.state.records, checks=checks.by_record)
    lines = [MixtureChange(3, {"toy": 1, "adder@2": 1}), MixtureChange(5, {"toy": 1})]
    async with served(app) as url, TrainerClient(url) as trainer:
        await trainer.hand_over("mixture", [line.encode().decode().strip() for line in lines])
        for bad in (MixtureChange(7, {"evil": 1}), MixtureChange(7, {"toy": 1}, first=("evil",))):
            with pytest.raises(InputError, match="evil"):
                await trainer.hand_over("mixture", [bad.encode().decode().strip()])
        with pytest.raises(VolleyError, match="mixture"):
            await trainer.hand_over("mixture", ['{"from_ticket":9}'])
        await trainer.hand_over("mixture", [lines[0].encode().decode().strip()])  # which is there
        await trainer.hand_over("mixture", [MixtureChange(9, {"adder@2": 1}).encode().decode().strip()])
    assert run.mixture.read_bytes() == b"".join(line.encode() for line in (*lines, MixtureChange(9, {"adder@2": 1})))
    assert asked == ["adder@2", "evil", "evil"]
