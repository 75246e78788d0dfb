"""Memory that is left, as the files of a kernel show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.process.host_memory import HostMemory, host_limit, measure, report

MIB = 2**20


def kernel(folder: Path, available_mib: int, *, waited: float | None = None, path: str = "/") -> Path:
    """The /proc of a machine of 1,000 MiB."""
    proc = folder / "proc"
    (proc / "pressure").mkdir(parents=True)
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text(f"4:memory:{path}\n0::{path}\n", encoding="utf-8")
    lines = {"MemTotal": 1000, "MemAvailable": available_mib, "SwapTotal": 100, "SwapFree": 75}
    (proc / "meminfo").write_text("".join(f"{k}: {n * 1024} kB\n" for k, n in lines.items()), encoding="utf-8")
    if waited is not None:
        text = f"some avg10=0.00 avg60={waited} avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
        (proc / "pressure/memory").write_text(text, encoding="utf-8")
    return proc


def container(folder: Path, version: int, limit_mib: int, used_mib: int, cached_mib: int) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(str(limit_mib * MIB), encoding="utf-8")
    (folder / names[1]).write_text(str(used_mib * MIB), encoding="utf-8")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached_mib * MIB}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("available_mib", "waited", "is_short"),
    [(500, None, False), (500, 3.0, False), (79, None, True), (500, 25.5, True)],
)
def test_a_machine_is_short_of_memory_before_none_is_left(
    tmp_path: Path, available_mib: int, waited: float | None, is_short: bool
) -> None:
    found = measure(tmp_path, kernel(tmp_path, available_mib, waited=waited))
    assert (found.on, found.total, found.available) == ("this machine", 1000 * MIB, available_mib * MIB)
    assert (found.shortage() is not None) == is_short
    if waited == 25.5:
        assert "0.5 GiB of 1.0 GiB are available, and 0.0 GiB are in swap" in (found.shortage() or "")
        assert "waited for memory 26% of the last minute" in (found.shortage() or "")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["/", "/job/7"])
def test_the_limit_of_a_container_counts_and_its_cache_is_available(tmp_path: Path, version: int, path: str) -> None:
    proc, root = kernel(tmp_path, 900, path=path), tmp_path / "cgroup" / ("memory" if version == 1 else "")
    container(root / path.strip("/").split("/")[0], version, limit_mib=200, used_mib=195, cached_mib=5)
    found = measure(tmp_path / "cgroup", proc)
    assert (found.on, found.total, found.available) == ("this container", 200 * MIB, 10 * MIB)
    assert host_limit(tmp_path / "cgroup", proc) == (200 * MIB, "this container")
    assert "this container" in (found.shortage() or "")


def test_a_report_reads_as_it_was_written_and_anything_else_as_nothing() -> None:
    found = report()
    assert found is not None
    assert HostMemory.from_json(found) == HostMemory(**found)
    for other in (None, {}, "full", found | {"total": "much"}, {k: v for k, v in found.items() if k != "host"}):
        assert HostMemory.from_json(other) is None
