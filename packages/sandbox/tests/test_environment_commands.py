"""`volley env` against a service of its own: what people type, and what they read."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.process.ports import free_port
from shared.run.folder import RunFolder
from shared.services_schema import ServicesSection
from tests.support.net import wait_http
from volley.__main__ import main
from volley.layout import PROJECT
from volley.runs import addresses

type Volley = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("env")
    port = free_port()
    config = folder / "run.yaml"
    config.write_text(
        f"run: {{dir: {folder}}}\nmodel: {{path: none}}\ndata: {{env: sokoban}}\n"
        f"services: {{env: {{port: {port}, unsandboxed: [sums, broken, zipped, project]}}}}\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, "-m", "services.env", "--config", str(config)], cwd=PROJECT) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert process.wait(30) == 0


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
    code, out, _ = volley("init", str(file))
    assert (code, f"train it:  volley train MODEL --env {file}\n" in out) == (0, True)
    missing = tmp_path / "x"
    assert volley("init", str(missing / "y.py"))[2].startswith(f"volley: folder {missing} does not exist\n")
    assert volley("init", str(file)) == (2, "", f"volley: {file} exists already\n  choose another name\n")
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
    assert (code, "no environment 'nobody' was submitted" in err) == (1, True)


def test_settings_and_a_remote_environment_are_submitted(volley: Volley, url: str, tmp_path: Path) -> None:
    rows, settings = tmp_path / "rows.jsonl", tmp_path / "settings.yaml"
    rows.write_text(
        '{"responses_create_params": {"input": "Say x."}, "initial_count": 0, "expected_count": 0}\n', encoding="utf-8"
    )
    settings.write_text("max_turns: 3\n", encoding="utf-8")
    command = [sys.executable, "-m", "packages.sandbox.tests.nemo_gym_server", str(port := free_port())]
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
    assert "holds a list, not a mapping" in volley(*whole)[2]
    assert "a remote environment needs a name" in volley("submit", *remote, "--url", url)[2]
    assert "--remote and --protocol belong together" in volley("submit", *remote[:2], "--url", url)[2]
    code, _, err = volley("submit", "--import-path", "somewhere.envs:Maze", "--url", url)
    assert (code, "is not an environment of a package installed beside the service" in err) == (1, True)


SUMS = (PROJECT / "packages/sandbox/volley_sandbox/submissions/templates/sums.py").read_text(encoding="utf-8")


def packed(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.py", content)
    return path


def test_a_zip_file_and_a_folder_are_submitted(volley: Volley, url: str, tmp_path: Path) -> None:
    sized = SUMS.replace("class Sums:", "class Sums:\n    def __init__(self, size=3):\n        self.size = size\n")
    assert sized != SUMS
    settings = tmp_path / "settings.yaml"
    settings.write_text("size: 7\n", encoding="utf-8")
    whole = packed(tmp_path / "zipped.zip", zipped=sized)
    code, out, err = volley("submit", str(whole), "--config", str(settings), "--url", url)
    assert (code, "zipped@1 is active" in out) == (0, True), out + err
    (folder := tmp_path / "project").mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "project"\nversion = "1"\n', encoding="utf-8")
    (folder / "src").mkdir()
    (folder / "src" / "envs.py").write_text(SUMS, encoding="utf-8")
    code, out, err = volley("submit", str(folder), "--url", url)
    assert (code, "project@1 is active" in out) == (0, True), out + err
    (folder / "src" / "more.py").write_text("x = 1\n", encoding="utf-8")
    code, out, err = volley("submit", str(folder), "--url", url, "--replace")
    assert (code, "project@2 is active" in out) == (0, True), out + err
    (folder / "src" / "more.py").write_text(SUMS, encoding="utf-8")
    code, out, err = volley("submit", str(folder), "--url", url, "--replace")
    assert (code, "the archive holds envs:Sums, more:Sums; which class" in err) == (1, True), out + err
    assert volley("submit", str(folder), "--url", url, "--replace", "--entry", "envs:Sums")[0] == 0


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8-sig", "utf-16"])
def test_a_file_in_the_encoding_it_declares_is_submitted(
    volley: Volley, url: str, tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / f"in_{encoding}.py"
    declared = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-\n"
    file.write_bytes((declared + "# é\n" + SUMS).encode(encoding))
    code, out, err = volley("submit", str(file), "--url", url)
    assert (code, "is active" in out) == (0, True), out + err


def test_standard_input_is_submitted(volley: Volley, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("text", SUMS.encode()), ("zip", packed(tmp_path / "a.zip", a=SUMS).read_bytes())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        code, out, err = volley("submit", "-", "--name", f"stdin_{name}", "--url", url)
        assert (code, f"stdin_{name}@1 is active" in out) == (0, True), out + err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SUMS.encode()), encoding="utf-8"))
    assert "an environment from standard input needs a name" in volley("submit", "-", "--url", url)[2]


def test_what_is_no_environment_is_named_before_anything_is_sent(volley: Volley, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("nothing", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.py").touch()
    (tmp_path / "text.zip").write_text("no zip file", encoding="utf-8")
    whole = packed(tmp_path / "whole.zip", a=SUMS).read_bytes()
    (tmp_path / "torn.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bytes.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "declared.py").write_bytes(b"# coding: klingon\n")
    os.mkfifo(tmp_path / "fifo")
    for name, told in (
        ("nowhere.zip", "does not exist"),
        ("folder", "holds no environment"),
        ("empty", "holds no environment"),
        ("empty.py", "is empty"),
        ("text.zip", "is not a zip file"),
        ("torn.zip", "is a damaged zip file"),
        ("bytes.py", "declare its encoding"),
        ("null.py", "null bytes"),
        ("declared.py", "unknown encoding"),
        ("fifo", "is neither a file nor a folder"),
    ):
        for command in ("submit", "test"):
            code, out, err = volley(command, str(tmp_path / name))
            assert (code, out, told in err, len(err.splitlines()) <= 2) == (2, "", True, True), err


def test_a_zip_file_a_folder_and_a_file_with_imports_are_tried_without_a_service(tmp_path: Path) -> None:
    (folder := tmp_path / "package").mkdir()
    (folder / "__init__.py").write_text(SUMS, encoding="utf-8")
    (tmp_path / "base.py").write_text(SUMS, encoding="utf-8")
    (beside := tmp_path / "json.py").write_text("from base import Sums\nclass Mine(Sums): ...\n", encoding="utf-8")
    for path in (packed(tmp_path / "sums.zip", sums=SUMS), folder, beside):
        command = [sys.executable, "-m", "volley", "env", "test", str(path)]
        ended = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=120)
        assert (ended.returncode, "ok    loads" in ended.stdout) == (0, True), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("text", "hint"),
    [("import nowhere", "`# /// script`"), ("x = 1", "`volley env init FILE.py --template agent`")],
)
def test_a_file_that_does_not_load_gets_a_hint(tmp_path: Path, text: str, hint: str) -> None:
    (file := tmp_path / "mine.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "volley", "env", "test", str(file)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=120)
    assert (ended.returncode, hint in ended.stdout.splitlines()[1]) == (1, True), ended.stdout


def test_the_log_of_a_run_that_has_ended_is_where_its_files_are(volley: Volley, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    addresses.write(folder, {"env": f"http://127.0.0.1:{free_port()}"}, {}, ServicesSection())
    code, _, err = volley("logs", "fruit", "--run", str(tmp_path))
    told = f"run {folder.name} has ended, and its environment service with it\n  its logs are in {folder.logs};"
    assert (code, told in err) == (1, True), err
    addresses.write(folder, {}, {"env": f"http://127.0.0.1:{free_port()}"}, ServicesSection())
    code, _, err = volley("logs", "fruit", "--run", str(tmp_path))
    assert (code, "has ended" in err) == (1, False), err


def test_a_file_is_tried_with_settings_of_the_service(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text(SUMS, encoding="utf-8")
    container = "{kind: container, image: python, engine: no-such-engine}"
    for setting, code, told in (
        ("services.env.sandbox_memory_mb=600", 0, ""),
        (f"services.env.sandbox={container}", 2, "no-such-engine"),
        ("services.env.sandbox.knd=process", 2, "services.env.sandbox"),
        ("trainer.seed=1", 2, "no setting of the environment service"),
    ):
        command = [sys.executable, "-m", "volley", "env", "test", str(file), "--entry", "Sums", setting]
        ended = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=120)
        assert (ended.returncode, told in ended.stderr) == (code, True), ended.stderr


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
    command = [sys.executable, "-m", "volley", "env", "test", str(file)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "FAIL  determinism: train/0 began differently when it was reset again with the same seed" in ended.stdout
