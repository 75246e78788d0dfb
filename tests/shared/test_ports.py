"""Ports that are free now, and nobody else's tomorrow."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from shared.process.ports import free_port, hold, hold_free

CHOOSE = """
import sys
from shared.process.ports import free_port
print(*(free_port() for _ in range(300)), flush=True)
sys.stdin.read()
"""


def chosen(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHOOSE]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        cwd=Path(__file__).parents[2],
    )


def ports_of(process: subprocess.Popen[str]) -> set[int]:
    assert process.stdout is not None
    return set(map(int, process.stdout.readline().split()))


def test_processes_that_live_choose_from_different_ports(tmp_path: Path) -> None:
    """Also while nobody listens there yet: a service that is about to start finds its port free."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    processes = [chosen(environment) for _ in range(4)]
    try:
        found = [ports_of(process) for process in processes]
        assert len(set.union(*found)) == sum(map(len, found))
        assert all(len(ports) > 200 for ports in found)
        assert min(map(min, found)) > 10_000
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_chooses_from_what_no_other_has(tmp_path: Path) -> None:
    """And from anything once others have all."""
    with (tmp_path / f"volley-ports-{os.getuid()}").open("wb") as lock:
        for n_taken, first in ((79, 12_000 + 79 * 250), (80, 12_000)):
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, n_taken)
            with chosen(os.environ | {"TMPDIR": str(tmp_path)}) as process:
                assert min(ports_of(process)) >= first
                process.kill()


def test_ports_of_processes_that_are_gone_are_chosen_again(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    for _ in range(3):
        with chosen(environment) as process:
            assert len(ports_of(process)) > 200
            process.kill()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_where_no_lock_can_be_had_ports_are_chosen_all_the_same(tmp_path: Path) -> None:
    (tmp_path / f"volley-ports-{os.getuid()}").mkdir()
    with chosen(os.environ | {"TMPDIR": str(tmp_path)}) as process:
        assert len(ports_of(process)) > 200
        process.kill()


def test_a_port_is_not_chosen_again_soon_and_one_that_is_taken_not_at_all() -> None:
    with hold("127.0.0.1", free_port()) as listener:
        listener.listen()
        found = [free_port() for _ in range(240)]
        assert len(set(found)) > 200
        assert listener.getsockname()[1] not in found


def test_the_port_of_before_is_taken_again_where_it_is_free() -> None:
    before = free_port()
    with hold_free("127.0.0.1", before) as listener:
        assert listener.getsockname()[1] == before
        listener.listen()
        assert free_port(before) != before
