"""The embedded server: where it comes from, who may talk to it, what is left when it stops."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from shared.errors import ConfigError, QueueUnavailable
from shared.queue import server
from shared.queue.client import command, connect
from shared.queue.server import ServerSpec, find_binary, folder_lock, prepare
from tests.support.tokens import write_private
from tools.embedded_redis import embedded_server, running


async def test_data_survives_a_restart_at_the_same_address(tmp_path: Path):
    spec = prepare(tmp_path / "a folder")
    for expected in (1, 2):
        with running(spec):
            async with connect(spec.url) as client:
                assert await client.incr("n") == expected


def test_the_password_is_in_no_command_line_and_in_private_files(redis_server: ServerSpec):
    assert redis_server.password not in " ".join(redis_server.argv)
    assert redis_server.password not in repr(redis_server)
    assert stat.S_IMODE(os.stat(redis_server.config).st_mode) == 0o600
    assert redis_server.password not in redis_server.log.read_text(encoding="utf-8")


async def test_a_client_without_the_password_is_refused(redis_server: ServerSpec, tmp_path: Path):
    address = f"redis://127.0.0.1:{redis_server.port}/0"
    for password, accepted in ((None, False), ("wrong", False), (redis_server.password, True)):
        password_file = write_private(tmp_path / "password", str(password))
        async with connect(address, password_file if password else None) as client:
            if accepted:
                assert await client.ping()
            else:
                with pytest.raises(ConfigError, match="refuses"):
                    await command(client, "PING")


async def test_the_server_keeps_everything_it_acknowledged(redis_server: ServerSpec):
    async with connect(redis_server.url) as client:
        names = ("appendonly", "appendfsync", "maxmemory-policy", "bind")
        values = [(await client.config_get(name))[name] for name in names]
    assert values == ["yes", "everysec", "noeviction", "127.0.0.1"]


def test_two_servers_never_share_a_folder(tmp_path: Path):
    with embedded_server(tmp_path), pytest.raises(ConfigError, match="another server"), embedded_server(tmp_path):
        pass
    with embedded_server(tmp_path):
        pass


def test_a_server_that_inherits_the_lock_holds_it_for_as_long_as_it_lives(tmp_path: Path):
    spec = prepare(tmp_path)
    with folder_lock(tmp_path) as lock:
        orphan = subprocess.Popen(spec.argv, stdout=subprocess.DEVNULL, pass_fds=(lock,))
    try:
        with pytest.raises(ConfigError, match="another server"), folder_lock(tmp_path):
            pass
    finally:
        orphan.kill()
        orphan.wait()
    with folder_lock(tmp_path):
        pass


def test_it_is_gone_after_an_error(tmp_path: Path):
    spec = prepare(tmp_path)
    with pytest.raises(ZeroDivisionError), running(spec) as process:
        raise ZeroDivisionError
    assert process.returncode is not None


def test_a_server_that_cannot_start_says_why(tmp_path: Path, redis_server: ServerSpec):
    spec = prepare(tmp_path)
    spec.config.write_text(
        spec.config.read_text(encoding="utf-8").replace(str(spec.port), str(redis_server.port)), encoding="utf-8"
    )
    with pytest.raises(QueueUnavailable, match=r"(?i)ended with code 1.*in use"), running(spec):
        pass


@pytest.mark.parametrize("file", ["*.base.*", "*.incr.*", "*.manifest"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
async def test_data_that_cannot_be_loaded_are_set_aside(tmp_path: Path, file: str, damage: str):
    """Some damage the server copes with by itself; whatever it does not start with is moved away."""
    spec = prepare(tmp_path)
    with running(spec):
        async with connect(spec.url) as client:
            await client.set("key", "x" * 1000)
            await client.bgrewriteaof()
    data = max((tmp_path / "appendonlydir").glob(file))
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(b"garbage\r\n" * 100)
    try:
        with running(spec):
            return
    except QueueUnavailable:
        assert server.set_aside(spec, spec.log) == tmp_path / "appendonlydir.bad"
    with running(spec):
        async with connect(spec.url) as client:
            assert await client.get("key") is None


def test_nothing_is_set_aside_for_another_reason(tmp_path: Path, redis_server: ServerSpec):
    spec = prepare(tmp_path)
    with running(spec):
        pass
    with spec.log.open("a", encoding="utf-8") as log:
        log.write("Background AOF rewrite finished successfully\n")  # and then it was killed
    began = spec.log.stat().st_size
    spec.config.write_text(
        spec.config.read_text(encoding="utf-8").replace(str(spec.port), str(redis_server.port)), encoding="utf-8"
    )
    with pytest.raises(QueueUnavailable), running(spec):
        pass
    assert server.set_aside(spec, spec.log, began) is None


def program(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_server_on_the_path_comes_first_unless_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    old = program(tmp_path / "bin", "redis-server", "Redis server v=6.0.16 sha=0")
    assert find_binary().parent != old.parent
    program(old.parent, "redis-server", "Redis server v=7.0.15 sha=0")
    assert find_binary() == old
    newer = program(old.parent, "valkey-server", "Valkey server v=8.1.0 sha=0")
    assert find_binary() == newer


def test_without_any_server_the_message_names_the_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "_bundled_binary", lambda: None)
    with pytest.raises(ConfigError, match=r"not on PATH.*REDIS_URL"):
        find_binary()
