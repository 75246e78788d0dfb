"""Lines that a holder of the service token hands over: the trainer refuses those that the proof would name for ever."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.orchestrator.schedule.handover import RecordHandover
from services.orchestrator.status import RunStatus
from shared.clients.trainer import TrainerClient
from shared.data_schema import DataSection
from shared.errors import InputError, NotReady
from shared.run.folder import RunFolder
from shared.run.mixture import MixtureChange
from tests.support import lies
from tests.support.asgi import served
from tests.support.records import records_app
from tests.support.small_run import RUN
from volley_proof.records.checks import RecordChecks
from volley_proof.verify import command

NEWEST = {"step": 5, "version_min": "e000002-s000005", "version_max": "e000002-s000005", "data": {"eval": "a"}}
RESULT = {"n_tasks": 100, "success": 1.0, "reward_mean": 1.0, "failed": 0}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lies.make(tmp_path_factory.mktemp("valid") / RUN)


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(valid, tmp_path / RUN)))


def app_of(run: RunFolder) -> Any:
    async def versions(name: str) -> None: ...

    app = records_app(run.path)
    checks = RecordChecks(run, RUN, DataSection(env="toy"), versions).by_record
    app.state.records = replace(app.state.records, checks=checks)
    return app


def of(version: str, **more: Any) -> dict[str, Any]:
    return NEWEST | RESULT | {"step": int(version[-6:]), "version_min": version, "version_max": version} | more


MADE_OF_NOTHING = [
    ("evals", of("e000002-s000006")),
    ("evals", of("e000007-s000005")),
    ("evals", of("e000002-s000002", version_max="e000002-s000003")),
    ("evals", of("e000001-s000002", success=0.75)),
    ("evals", of("e000002-s000005", success=9.0)),
    ("evals", of("e000002-s000005", failed=-5)),
    ("evals", of("e000002-s000005", reward_mean="good")),
    ("evals", of("e000002-s000005", step=4)),
    ("evals", of("e000002-s000005", data={"eval": "b"})),
    ("evals", of("e000002-s000005", version_min=7)),
    ("evals", {"step": 5, **RESULT}),
    ("samples", {"step": 6, "task": "eval/0", "success": True, "text": "4"}),
    ("samples", {"task": "eval/0"}),
]


@pytest.mark.parametrize(("record", "line"), MADE_OF_NOTHING)
async def test_a_line_that_the_run_cannot_have_is_refused(run: RunFolder, record: Any, line: dict[str, Any]):
    async with served(app_of(run)) as url, TrainerClient(url) as trainer:
        await trainer.hand_over("evals", [orjson.dumps(NEWEST | RESULT).decode()])
        with pytest.raises(InputError) as refused:
            await trainer.hand_over(record, [orjson.dumps(line).decode()])
    assert refused.value.status == 422
    assert (await asyncio.to_thread(command.verify, run))["violations"] == []


@pytest.mark.parametrize("record", ["evals", "samples"])
async def test_one_key_twice_is_refused(run: RunFolder, record: Any):
    text = orjson.dumps(of("e000002-s000005", success=0.5)).decode()
    async with served(app_of(run)) as url, TrainerClient(url) as trainer:
        with pytest.raises(InputError):
            await trainer.hand_over(record, ['{"step":4,' + text[1:]])


@pytest.mark.parametrize(
    "change",
    [
        MixtureChange(9, {"adder": 1}),  # which was trained as toy
        MixtureChange(2**40, {"toy": 1}),  # hides all that follow
        MixtureChange(14, {"toy": 1}),  # before the last one
    ],
)
async def test_a_mixture_that_contradicts_the_run_is_refused(run: RunFolder, change: MixtureChange):
    good = MixtureChange(20, {"toy": 1, "adder": 1})
    async with served(app_of(run)) as url, TrainerClient(url) as trainer:
        if change.from_ticket != 9:
            await trainer.hand_over("mixture", [good.encode().decode().strip()])
        with pytest.raises(InputError) as refused:
            await trainer.hand_over("mixture", [change.encode().decode().strip()])
        await trainer.hand_over("mixture", [good.encode().decode().strip()])
    assert refused.value.status == 422
    assert run.mixture.read_bytes() == good.encode()


async def test_the_orchestrator_skips_a_line_that_is_refused(run: RunFolder, tmp_path: Path):
    """Lines of a version that a restored folder of the trainer does not have; all others arrive."""
    own, before = RunFolder(tmp_path / "own"), run.evals.read_bytes()
    own.path.mkdir()
    unknown = [orjson.dumps(of("e000002-s000009")), orjson.dumps(of("e000002-s000007"))]
    known = orjson.dumps(of("e000002-s000005"))
    own.evals.write_bytes(before + b"".join(line + b"\n" for line in (unknown[0], known, unknown[1])))
    async with served(app_of(run)) as url, TrainerClient(url) as trainer:
        await RecordHandover(trainer, own, RunStatus()).finish()
    assert run.evals.read_bytes() == before + known + b"\n"


async def test_a_run_without_a_version_asks_to_repeat(run: RunFolder):
    shutil.rmtree(run.archive)
    shutil.rmtree(run.checkpoints)
    async with served(app_of(run)) as url, TrainerClient(url) as trainer:
        with pytest.raises(NotReady):
            await trainer.hand_over("evals", [orjson.dumps(of("e000002-s000005")).decode()])
