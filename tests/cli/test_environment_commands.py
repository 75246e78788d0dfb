"""`volley env` against a service of its own: what people type, and what they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.layout import PROJECT
from shared.process.ports import free_port
from tests.support.net import wait_http

type Volley = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("env")
    port = free_port()
    config = folder / "run.yaml"
    config.write_text(
        f"run: {{dir: {folder}}}\nmodel: {{path: none}}\ndata: {{env: sokoban}}\n"
        f"services: {{env: {{port: {port}, unsandboxed: [sums, broken]}}}}\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, "-m", "services.env", "--config", str(config)], cwd=PROJECT) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def volley(capsys: pytest.CaptureFixture[str]) -> Volley:
    def run(*arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with pytest.raises(SystemExit) as ended:
            main(["env", *arguments])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


def test_a_template_is_written_tried_and_submitted(volley: Volley, url: str, tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    assert volley("init", str(file))[0] == 0
    assert volley("init", str(file)) == (2, "", f"volley: {file} is there already (choose another name)\n")
    code, out, _ = volley("submit", str(file), "--url", url)
    assert code == 0
    assert out.splitlines()[:3] == ["sums@1 is submitted", "sums@1 is validating", out.splitlines()[2]]
    assert "ok    demonstrations: played to the end they promise" in out
    assert "sums@1" in volley("list", "--url", url)[1]
    assert "active      validated; weight 0 joins no live run" in volley("show", "sums", "--url", url)[1]
    assert volley("retire", "sums", "--url", url)[1] == "sums@1 is retired\n"
    assert volley("activate", "sums", "--url", url)[1] == "sums@1 is active\n"
    file.write_text(file.read_text(encoding="utf-8") + "\n# the second\n", encoding="utf-8")
    code, _, err = volley("submit", str(file), "--url", url)
    assert (code, "PUT /environments/sums submits a new version" in err) == (1, True)
    assert volley("submit", str(file), "--url", url, "--replace")[0] == 0
    assert volley("activate", "sums@1", "--url", url)[1] == "sums@1 is active\n"


def test_what_is_wrong_with_a_file_is_told_with_its_line(volley: Volley, url: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "class A:\n    splits = {'train': 3}\n    def reset(self, split, index, seed):\n        return 1 / 0\n",
        encoding="utf-8",
    )
    code, out, _ = volley("submit", str(file), "--url", url)
    assert code == 1
    assert "broken@1 is rejected: " in out
    assert "FAIL" in out
    assert volley("submit", str(tmp_path / "none.py"), "--url", url)[0] == 2
    code, _, err = volley("show", "nobody", "--url", url)
    assert (code, "nobody submitted an environment 'nobody'" in err) == (1, True)


def test_settings_and_a_remote_environment_are_submitted(volley: Volley, url: str, tmp_path: Path) -> None:
    rows, settings = tmp_path / "rows.jsonl", tmp_path / "settings.yaml"
    rows.write_text(
        '{"responses_create_params": {"input": "Say x."}, "initial_count": 0, "expected_count": 0}\n', encoding="utf-8"
    )
    settings.write_text("max_turns: 3\n", encoding="utf-8")
    command = [sys.executable, "-m", "tests.env.nemo_gym_server", str(port := free_port())]
    with subprocess.Popen(command, cwd=PROJECT) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/openapi.json")
            remote = ["--remote", f"http://127.0.0.1:{port}", "--protocol", "nemo_gym", "--tasks", f"train={rows}"]
            whole = ["submit", "--name", "far", *remote, "--config", str(settings), "--url", url]
            code, out, _ = volley(*whole)
            assert (code, "ok    splits: train: 1" in out) == (0, True), out
        finally:
            process.kill()
    settings.write_text("- a\n", encoding="utf-8")
    assert "does not hold a mapping" in volley(*whole)[2]
    assert "a remote environment needs a name" in volley("submit", *remote, "--url", url)[2]
    assert "--remote and --protocol belong together" in volley("submit", *remote[:2], "--url", url)[2]
    code, _, err = volley("submit", "--import-path", "somewhere.envs:Maze", "--url", url)
    assert (code, "is no environment of a package that is installed beside the service" in err) == (1, True)


def test_a_file_is_tried_without_a_service(tmp_path: Path) -> None:
    """The report comes from another process: a real one, as people see it."""
    file = tmp_path / "dice.py"
    file.write_text(
        "import random\n"
        "class Dice:\n"
        "    splits = {'train': 30, 'eval': 10}\n"
        "    def reset(self, split, index, seed):\n"
        "        return f'{split} {index} {random.random()}' + str(__import__('time').time())\n"
        "    def step(self, text):\n"
        "        return '', 1.0, True, False, {}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "services.cli", "env", "test", str(file)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "FAIL  determinism: train/0 began differently when it was reset again with the same seed" in ended.stdout
