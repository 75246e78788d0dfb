"""`--json` of the commands that train, serve and compute for long, on a real run: one JSON value on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.support.stack import SMALL, training
from volley.layout import PROJECT

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PAIR = {
    "prompt": [{"role": "user", "content": "P__O"}],
    "chosen": [{"role": "assistant", "content": "Down"}],
    "rejected": [{"role": "assistant", "content": "Up"}],
}
SERVERS = {
    "dashboard": ("{tmp} --port 0", "url"),
    "serve": ("{run} --port 0 --context-length 64", "token"),
    "tinker": ("{tmp}/exported --port 0 --folder {tmp}/tinker --context-length 64", "api_key"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A finished run, its weights as a folder, and files of conversations."""
    folder = tmp_path_factory.mktemp("json")
    with training(folder, "trainer.max_steps=2", "data.n_eval_tasks=2") as run:
        assert run.wait(300) == 0, run.text()
        (folder / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n", encoding="utf-8")
        found = {"run": str(run.folder.path), "tmp": str(folder)}
        code, value = called("export {run} {tmp}/exported", found)
        assert (code, value["folder"]) == (0, f"{folder}/exported")
        yield found


def called(command: str, places: dict[str, str]) -> tuple[int, Any]:
    words = [*command.format(**places).split(), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "volley", *words], cwd=PROJECT, capture_output=True, timeout=380, check=False
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, orjson.loads(done.stdout)


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (f"train --config {SMALL} run.dir={{tmp}} run.name=new trainer.max_steps=1 data.n_eval_tasks=2", ["steps"]),
        ("quickstart run.dir={tmp} trainer.max_steps=1 sft.max_steps=2 data.n_eval_tasks=2", ["steps", "verify"]),
        (f"sft --config {SMALL} run.dir={{tmp}} sft.max_steps=1", ["steps", "final_weight_version"]),
        (f"dpo {{tmp}}/pairs.jsonl --config {SMALL} run.dir={{tmp}} sft.max_steps=1 sft.batch_size=1", ["steps"]),
        ("eval {run} run.dir={tmp}", ["evaluations", "model"]),
        ("replay {run} --from-step 0", ["ok", "steps"]),
        ("reverify {run}", ["environments", "changed"]),
    ],
)
def test_the_result_is_json(command: str, keys: list[str], places: dict[str, str]) -> None:
    code, value = called(command, places)
    assert (code, "error" in value) == (0, False), value
    assert {*keys} <= value.keys()


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_says_where_it_answers(name: str, places: dict[str, str]) -> None:
    arguments, key = SERVERS[name]
    command = [sys.executable, "-m", "volley", name, *arguments.format(**places).split(), "--json"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        try:
            text = b""
            while not text.endswith(b"\n}\n"):
                line = process.stdout.readline()
                assert line, text
                text += line
            value = orjson.loads(text)
        finally:
            os.kill(process.pid, signal.SIGINT)
        assert process.stdout.read() == b""
        assert process.wait(60) in (0, 130)  # 130: the signal came before its handler
    assert value["url"].startswith("http://")
    assert value[key]
