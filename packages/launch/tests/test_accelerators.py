"""Who sees which accelerators of a machine: by the files of made-up machines, and in the environment of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import LoadedConfig, load
from shared.errors import ConfigError
from volley_launch import accelerators

CONFIG = Path("configs/chaos.yaml")
SHARES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def configured(*overrides: str) -> LoadedConfig:
    return load([CONFIG], list(overrides))


def shares(root: Path, device: str, n: int, *overrides: str) -> dict[str, dict[str, str]]:
    return accelerators.shares(configured(f"rollout.engine.device={device}", *overrides).config, n, root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with eight chips of TPU v5e, other devices of the same maker, and four GPUs."""
    for name in ("TPU_VISIBLE_CHIPS", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", *SHARES):
        monkeypatch.delenv(name, raising=False)
    chips = [(f"0000:00:{i:02x}.0", "0x1ae0", "0x0063") for i in range(8)]
    others = [("0000:01:00.0", "0x1ae0", "0x0042"), ("0000:02:00.0", "0x10de", "0x2330")]
    for slot, vendor, device in chips + others:
        folder = tmp_path / "sys/bus/pci/devices" / slot
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n", encoding="utf-8")
        (folder / "device").write_text(f"{device}\n", encoding="utf-8")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_on_cpus_nothing_is_shared_out(machine: Path) -> None:
    assert shares(machine, "cpu", 99, "rollout.engine.tp_size=4") == {}


def test_every_process_has_gpus_of_its_own(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shares(machine, "gpu", 3)
    assert {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in given.items()} == {
        "trainer": "0",
        "rollout-0": "1",
        "rollout-1": "2",
        "rollout-2": "3",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a, 5,7")
    split = shares(machine, "gpu", 1, "rollout.engine.tp_size=2")
    assert split == {
        "rollout-0": {"CUDA_VISIBLE_DEVICES": "GPU-8a,5", "JAX_PLATFORMS": "cuda,cpu"},
        "trainer": {"CUDA_VISIBLE_DEVICES": "7", "JAX_PLATFORMS": "cuda,cpu"},
    }
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "JAX_PLATFORMS" not in shares(machine, "gpu", 1)["trainer"]


def test_a_server_of_another_project_has_its_devices_itself(machine: Path) -> None:
    given = shares(machine, "gpu", 1, "rollout.engine.kind=vllm", "rollout.engine.url=http://s")
    assert {name: one["CUDA_VISIBLE_DEVICES"] for name, one in given.items()} == {"trainer": "0"}


def test_every_process_has_chips_of_its_own_that_lie_together(machine: Path) -> None:
    given = shares(machine, "tpu", 2, "rollout.engine.tp_size=2", "trainer.mesh.shape=[4,1]")
    assert {name: one["TPU_VISIBLE_CHIPS"] for name, one in given.items()} == {
        "trainer": "0,1,2,3",
        "rollout-0": "4,5",
        "rollout-1": "6,7",
    }
    assert [one["TPU_CHIPS_PER_PROCESS_BOUNDS"] for one in given.values()] == ["2,2,1", "1,2,1", "1,2,1"]
    assert {one["TPU_PROCESS_BOUNDS"] for one in given.values()} == {"1,1,1"}
    assert len({one["TPU_PROCESS_PORT"] for one in given.values()}) == len(given)
    assert all(one["TPU_PROCESS_ADDRESSES"] == f"localhost:{one['TPU_PROCESS_PORT']}" for one in given.values())


def test_each_process_of_a_trainer_has_its_part_of_the_mesh(machine: Path) -> None:
    two = "services.trainer.num_processes=2", "trainer.mesh.shape=[2,1]"
    given = shares(machine, "gpu", 2, *two)
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in given.values()) == ["0", "1", "2", "3"]
    assert sum(name.startswith("trainer") for name in given) == 2


def test_a_process_with_all_chips_of_its_host_is_told_nothing(machine: Path) -> None:
    """A host may be part of a larger slice, of which the runtime knows by itself."""
    assert shares(machine, "tpu", 0, "trainer.mesh.shape=[8,1]") == {"trainer": {}}


@pytest.mark.parametrize(
    ("device", "n", "overrides", "named"),
    [
        (
            "gpu",
            4,
            (),
            r"the run needs 5 GPUs, but this machine has 4 for it: 1 for trainer\.mesh, 4 times 1 for services\.roll",
        ),
        ("tpu", 2, ("rollout.engine.tp_size=4",), "needs 9 TPUs, but this machine has 8"),
        ("tpu", 1, ("rollout.engine.tp_size=3",), "a process cannot have 3 of a host's 8 TPU chips"),
        ("gpu", 3, ("trainer.mesh.shape=[2,1]",), "the run needs 5 GPUs, but this machine has 4 for it: 2 for"),
    ],
)
def test_more_than_there_are_is_refused(
    machine: Path, device: str, n: int, overrides: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        shares(machine, device, n, *overrides)


def variables_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
