"""Commands that read a run's folder use no file, address or program that it names, unless its user wrote it or trusts
it.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
import yaml

from shared.errors import ConfigError
from shared.models.hub import model_of
from shared.models.origin import Origin
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services_schema import ServicesSection
from tests.support import small_run
from volley.__main__ import main
from volley.runs import addresses
from volley_proof.verify import command

SECRET = "a-secret-of-the-reader"
HEAD = "e000002-s000005"


class Listener:
    """Counts the connections to it, and keeps what they send first."""

    def __init__(self, server: socket.socket) -> None:
        self.server, self.received = server, list[bytes]()
        self.url = f"{{}}://127.0.0.1:{server.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            with connection:
                self.received.append(connection.recv(4096))


@pytest.fixture
def listener() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Listener(server)
        thread = threading.Thread(target=found.serve, daemon=True)
        thread.start()
        yield found
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / small_run.RUN)


@pytest.fixture
def foreign(valid: Path, tmp_path: Path, listener: Listener) -> RunFolder:
    """A run that somebody else made: it names the reader's files, and an address of its own."""
    folder = RunFolder(tmp_path / small_run.RUN)
    shutil.copytree(valid, folder.path)
    secret = tmp_path / "id_secret"
    secret.write_text(SECRET, encoding="utf-8")
    secret.chmod(0o600)
    services = {
        "redis_url": listener.url.format("redis"),
        "redis_password_file": str(secret),
        "env": {"url": listener.url.format("http")},
        "token_files": dict.fromkeys(("viewer", "service", "admin"), str(secret)),
    }
    folder.services.write_text(yaml.safe_dump({"services": services}), encoding="utf-8")
    tree = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    folder.config.write_text(yaml.safe_dump({**tree, "services": services}), encoding="utf-8")
    urls = {name: listener.url.format("http") for name in ("env", "orchestrator", "trainer", "rollout-0")}
    told = {"urls": urls, "token_files": services["token_files"], "ca_file": None}
    folder.processes.write_bytes(orjson.dumps(told))
    return folder


def code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "RUN"),
        ("status", "RUN"),
        ("access", "RUN"),
        ("env", "list", "--run", "RUN"),
        ("report", "RUN"),
        ("compare", "RUN", "RUN"),
        ("reverify", "RUN"),
        ("replay", "RUN", "--from-step", "3"),
        ("export", "RUN", "OUT"),
        ("eval", "RUN"),
    ],
    ids=" ".join,
)
def test_a_foreign_folder_gets_no_connection_and_no_secret(
    foreign: RunFolder, listener: Listener, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.path.parent)
    places = {"RUN": str(foreign.path), "OUT": str(foreign.path.parent / "out")}
    code(*(places.get(one, one) for one in arguments))
    assert listener.received == []


def test_verify_proves_a_foreign_folder_without_its_redis(
    foreign: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code("verify", str(foreign.path)) == 0
    assert "redis: not asked" in capsys.readouterr().out


@pytest.mark.parametrize("command_name", ["status", "access", "reverify", "eval"])
def test_a_refusal_says_how_the_folder_is_trusted(
    foreign: RunFolder, command_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(command_name, str(foreign.path)) == 2
    assert "--trust" in capsys.readouterr().err


def test_a_folder_that_its_reader_trusts_is_asked(foreign: RunFolder, listener: Listener) -> None:
    code("verify", str(foreign.path), "--trust")
    assert SECRET.encode() in listener.received[0]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "change", [_fifo, lambda path: path.mkdir(), lambda path: path.write_text("guess", encoding="utf-8")]
)
def test_a_mark_that_this_user_did_not_make_is_none(
    valid: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = RunFolder(tmp_path / "r")
    shutil.copytree(valid, folder.path)
    folder.secrets.mkdir(exist_ok=True)
    (folder.secrets / "written_by").unlink(missing_ok=True)
    change(folder.secrets / "written_by")
    assert not trust.is_own(folder)


@pytest.mark.parametrize("changed", ["config.yaml", "services.yaml", "processes.json"])
def test_a_run_of_ones_own_is_known_also_when_it_has_moved_until_its_configuration_changes(
    tmp_path: Path, changed: str
) -> None:
    made = RunFolder(tmp_path / "made")
    made.path.mkdir()
    made.config.write_text("a", encoding="utf-8")
    addresses.write(made, {}, {}, ServicesSection())
    moved = RunFolder(tmp_path / "moved")
    made.path.rename(moved.path)
    assert trust.is_own(moved)
    (moved.path / changed).write_text("b", encoding="utf-8")
    assert not trust.is_own(moved)


@pytest.mark.parametrize("linked", ["config.yaml", ".secrets/written_by", ".secrets"])
def test_a_folder_with_a_link_in_the_place_of_its_configuration_is_not_ones_own(tmp_path: Path, linked: str) -> None:
    made = RunFolder(tmp_path / "made")
    made.path.mkdir()
    made.config.write_text("a", encoding="utf-8")
    addresses.write(made, {}, {}, ServicesSection())
    moved = RunFolder(tmp_path / "moved")
    made.path.rename(moved.path)
    (moved.path / linked).rename(tmp_path / "outside")
    (moved.path / linked).symlink_to(tmp_path / "outside")
    assert not trust.is_own(moved)


def test_without_a_home_nothing_is_marked_and_this_process_knows_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    trust.mark(folder)
    assert trust.is_own(folder)
    folder.path.rename(tmp_path / "moved")
    assert not trust.is_own(RunFolder(tmp_path / "moved"))


def test_a_variable_of_the_environment_is_not_put_into_a_foreign_configuration(
    foreign: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    foreign.config.write_text(
        foreign.config.read_text(encoding="utf-8") + "\nmode: ${oc.env:A_SECRET}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError) as refused:
        command.verify(foreign)
    assert SECRET not in str(refused.value)


def test_a_run_to_start_from_names_no_model_outside_its_folder(foreign: RunFolder) -> None:
    (foreign.path.parent / "private").mkdir()
    tree = yaml.safe_load(foreign.config.read_text(encoding="utf-8"))
    tree["model"] = {"path": str(foreign.path.parent / "private")}
    foreign.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match="--trust"):
        model_of(Origin("r", str(foreign.path), HEAD, "0"))


def test_who_trusts_a_folder_of_runs_trusts_the_runs_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_accepted", set[str]())
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for folder in (runs / "a", elsewhere / "b"):
        folder.mkdir(parents=True)
    (runs / "b").symlink_to(elsewhere / "b")
    trust.accept(RunFolder(runs))
    accepted = [trust.is_accepted(RunFolder(path)) for path in (runs / "a", runs / "b", elsewhere / "b")]
    assert accepted == [True, False, False]
