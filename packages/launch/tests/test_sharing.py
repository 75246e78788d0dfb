"""Share one GPU: the parts of its memory on made-up machines, in a plan, and in the environment of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from packages.launch.tests.test_accelerators import SHARES, variables_of
from shared.config import load
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.serving import ServerMemory, of_run
from tests.support.large_models import QWEN3_4B, QWEN3_30B, SMOLLM2
from tools.chaos.arena import SIMULATED
from volley.local import stack
from volley.local.processes import Reaper
from volley.local.stack import StackSeams
from volley.local.supervisor import RestartPolicy
from volley.runs.record import claimed
from volley_launch import accelerators, sharing
from volley_launch.plan.run_plan import PlanRequest, RunPlan, make

CONFIG = "configs/quickstart.yaml"
GPU = "rollout.engine.device=gpu"
GIB = 2**30
H200 = 143771 * 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a single GPU, about which nvidia-smi answers."""
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", *SHARES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    answers(tmp_path, "143771, Disabled, 0, GPU-0a, NVIDIA H200")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def answers(machine: Path, *lines: str) -> None:
    """Let nvidia-smi print these lines."""
    (machine / "nvidia-smi").write_text("#!/bin/sh\ncat <<.\n" + "\n".join((*lines, ".")), encoding="utf-8")


def shares(root: Path, n: int, *overrides: str, n_trainers: int | None = None) -> dict[str, dict[str, str]]:
    return accelerators.shares(load([CONFIG], [GPU, *overrides]).config, n, root, n_trainers)


def parts(given: dict[str, dict[str, str]]) -> dict[str, float]:
    return {name: float(one[SHARES[0]]) for name, one in given.items()}


def test_all_processes_see_the_gpu_and_have_parts_of_its_memory(machine: Path) -> None:
    given = shares(machine, 2)
    assert {one["CUDA_VISIBLE_DEVICES"] for one in given.values()} == {"0"}
    found = parts(given)
    assert found.keys() == {"trainer", "rollout-0", "rollout-1"}
    assert found["rollout-0"] == found["rollout-1"] < found["trainer"]
    assert 0.85 < sum(found.values()) <= 0.92
    servers = parts(shares(machine, 2, n_trainers=0))
    assert servers == {"rollout-0": 0.46, "rollout-1": 0.46}
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in shares(machine, 0)["trainer"]


def test_one_of_several_gpus_is_shared_if_it_is_the_visible_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "dev/nvidia1").touch()
    assert {one["CUDA_VISIBLE_DEVICES"] for one in shares(machine, 1).values()} == {"0", "1"}
    answers(machine, "143771, Disabled, 0, GPU-0a, NVIDIA H200", "2048, [N/A], 1, GPU-1b, NVIDIA T400")
    for name in ("0", "GPU-0a"):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        given = shares(machine, 1)
        assert {one["CUDA_VISIBLE_DEVICES"] for one in given.values()} == {name}
        assert parts(given) == {"trainer": 0.72, "rollout-0": 0.2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="2 processes do not fit on one GPU of 2"):
        shares(machine, 1)
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # which of them that is, only CUDA knows
    with pytest.raises(ConfigError, match="UUID"):
        shares(machine, 1)


@pytest.mark.parametrize("listed", ["0,0", "0,", "none", "GPU-8a,all", "GPU-9c", "1"])
def test_lists_of_gpus_that_cuda_cannot_read_are_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        shares(machine, 1)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(ConfigError, match="no GPU was found"):
        shares(machine, 1)


def test_the_memory_of_a_part_of_a_gpu_is_not_known(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(machine, "81559, Enabled, 0, GPU-0a, NVIDIA H100 80GB HBM3")
    assert parts(shares(machine, 1)) == {"trainer": 0.6, "rollout-0": 0.3}
    answers(machine, "81559, Disabled, 0, GPU-0a, NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3c")
    assert parts(shares(machine, 1)) == {"trainer": 0.6, "rollout-0": 0.3}


@pytest.mark.parametrize(("n", "n_trainers"), [(12, 1), (20, 0)])
def test_processes_for_which_nothing_is_left_are_refused(machine: Path, n: int, n_trainers: int) -> None:
    answers(machine, "15360, [N/A], 0, GPU-0a, Tesla T4")
    assert min(parts(shares(machine, 6)).values()) > 0.05
    with pytest.raises(ConfigError, match=f"{n + n_trainers} processes do not fit") as error:
        shares(machine, n, n_trainers=n_trainers)
    assert "services.rollout_replicas" in (error.value.hint or "")
    (refusal,) = plan("services.rollout_replicas=12", trainer="t4:1", rollout="shared").refusals
    assert "13 processes do not fit" in refusal.reason


def test_shares_are_fixed_if_memory_or_model_are_not_known(machine: Path) -> None:
    assert parts(shares(machine, 2, "model.path=/nowhere")) == {"trainer": 0.6, "rollout-0": 0.15, "rollout-1": 0.15}
    (machine / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert parts(shares(machine, 1)) == {"trainer": 0.6, "rollout-0": 0.3}


@pytest.mark.parametrize("variable", SHARES)
def test_shares_of_the_user_stay_if_they_fit(machine: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, ".45")
    assert all(not {*SHARES} & one.keys() for one in shares(machine, 1).values())
    with pytest.raises(ConfigError, match=f"3 processes share one GPU, but {variable}=0.45") as error:
        shares(machine, 2)
    assert "at most 0.3066" in (error.value.hint or "")
    for wrong in ("no number", "0", "-1", "nan"):
        monkeypatch.setenv(variable, wrong)
        for n in (0, 1):
            with pytest.raises(ConfigError, match=f"{variable}={wrong} is not a share"):
                shares(machine, n)
    for each in SHARES:
        monkeypatch.setenv(each, "0.3")
    with pytest.raises(ConfigError, match="both set"):
        shares(machine, 1)


@pytest.mark.parametrize("override", ["rollout.engine.tp_size=2", "trainer.mesh.shape=[2,1]"])
def test_a_gpu_is_not_shared_by_processes_that_need_several(machine: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="the run needs 3 GPUs, but this machine has 1") as error:
        shares(machine, 1, override)
    assert "share a GPU only if" in (error.value.hint or "")


@pytest.mark.parametrize("written", [QWEN3_4B, SMOLLM2])
@pytest.mark.parametrize("overrides", [(), ("rollout.engine.max_total_tokens=30000",), ("trainer.lora.rank=8",)])
@pytest.mark.parametrize("n", [1, 3])
def test_a_server_gets_room_for_its_pool_and_the_trainer_the_rest(
    written: dict[str, Any], overrides: tuple[str, ...], n: int
) -> None:
    model = ModelConfig.parse(dict(written))
    config = load([CONFIG], [GPU, "model.dtype=bfloat16", *overrides]).config
    found = sharing.divide(config, model, H200, n, 1, {})
    pool = config.rollout.engine.max_total_tokens or 128 * 40
    assert of_run(config, model, "gpu").largest_pool(int(0.99 * H200 * found.server)) >= pool
    assert 0.91 < found.trainer + n * found.server <= 0.92
    small = sharing.divide(config, model, 15 * GIB, n, 1, {})
    assert 15 * GIB * (1 - small.trainer - n * small.server) >= (n + 1) * 700 * 2**20


@pytest.mark.parametrize(
    "sizes", [ServerMemory(10**9, 10**8, 10**5), ServerMemory(10**6, 10**9, 10**4), ServerMemory(10**11, 10**8, 10**5)]
)
@pytest.mark.parametrize("pool", [1, 10**4, 10**6])
def test_a_pool_fits_into_the_memory_that_it_needs(sizes: ServerMemory, pool: int) -> None:
    assert sizes.largest_pool(sizes.needed(pool)) in (pool, pool + 1)
    assert sizes.largest_pool(sizes.needed(pool) - sizes.token) < pool


def plan(*overrides: str, of: dict[str, Any] = SMOLLM2, **asked: str) -> RunPlan:
    """Plan a run whose folder exists already: it needs no free disk, of which this machine may have too little."""
    here = Path(__file__).parent
    there = (f"run.dir={here.parent}", f"run.name={here.name}")
    return make(load([CONFIG], [GPU, *there, *overrides]), ModelConfig.parse(dict(of)), PlanRequest(**asked))


def test_a_plan_divides_the_gpu_as_the_run_does(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig.read(Path("configs/models/quickstart"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for n in (1, 2):
        given = parts(shares(machine, n))
        found = make(load([CONFIG], [GPU, f"services.rollout_replicas={n}"]), model, PlanRequest())
        assert found.refusals == ()
        assert found.trainer is not None
        assert found.rollout is not None
        assert found.trainer["usable"] == int(H200 * given["trainer"])
        assert found.rollout["limit"] == int(H200 * given["rollout-0"])
        assert (found.topology["rollout"]["servers"], found.topology["rollout"]["devices"]) == (n, 1)
    monkeypatch.setenv(SHARES[0], "0.6")
    (refusal,) = plan().refusals
    assert "2 processes share one GPU" in refusal.reason
    monkeypatch.delenv(SHARES[0])
    supervised = plan("mode=sft", "rollout.engine.tp_size=3")  # tp_size is of no process of the run
    assert supervised.refusals == ()
    (refusal,) = plan("rollout.engine.tp_size=3").refusals
    assert "trainer.mesh.shape=[1,1] with rollout.engine.tp_size=1" in refusal.change


def test_a_plan_for_one_gpu_of_another_machine() -> None:
    found = plan(trainer="h100:1", rollout="shared", prices={"h100": 2.0})
    assert found.refusals == ()
    assert found.cost is not None
    assert found.cost.per_hour == 2.0
    assert any("2 processes share one GPU" in note for note in found.notes)
    large = plan("model.dtype=bfloat16", of=QWEN3_30B, trainer="h100", rollout="shared")
    assert large.refusals
    assert not any("mesh" in one.change or "tp_size" in one.change for one in large.refusals)
    for asked in ({"trainer": "h100:2"}, {"trainer": "v5e:1"}):
        with pytest.raises(ConfigError, match="--rollout shared"):
            plan(rollout="shared", **asked)


def test_a_run_on_gpus_needs_an_environment_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX leaves out a platform that it has no package for, and the trainer would use the CPU."""
    python = tmp_path / "trainer/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho jax jax-cuda13-plugin libtpu-nightly\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("VOLLEY_VENVS", str(tmp_path))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    accelerators.check_backend("gpu", "trainer")
    with pytest.raises(ConfigError, match="trainer is installed for CPUs only") as error:
        accelerators.check_backend("tpu", "trainer")
    assert "VOLLEY_ACCELERATOR=tpu make install" in (error.value.hint or "")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/lib/libtpu.so")
    accelerators.check_backend("tpu", "trainer")


async def test_processes_of_a_run_are_started_with_their_parts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(machine, *(f"143771, Disabled, {i}, GPU-{i}a, NVIDIA H200" for i in range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    loaded = load(["configs/chaos.yaml"], [f"run.dir={machine}", "run.name=shares", GPU])
    seen: dict[str, dict[str, str]] = {}
    with claimed(loaded) as claim, Reaper.running() as reaper:
        seams = StackSeams(SIMULATED)
        async with stack.running(loaded, claim.folder, reaper, print, RestartPolicy(), seams) as running:
            for kept in running.kept:
                assert kept.child is not None
                seen[kept.name] = variables_of(kept.child.pid)
    for name in ("trainer", "rollout-0", "rollout-1"):
        assert seen[name]["CUDA_VISIBLE_DEVICES"] == "4"
        assert seen[name]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert sum(float(seen[name][SHARES[0]]) for name in ("trainer", "rollout-0", "rollout-1")) <= 0.92
    assert SHARES[0] not in seen["env"]
