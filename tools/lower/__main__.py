"""`make lower`: compile a configuration's steps for TPUs without having any.

    make lower ARGS="configs/gsm8k_qwen3_4b_tpu.yaml --tpu v5e trainer.mesh.shape=[4,2]"

Prints the memory that each program needs. libtpu compiles without a TPU. If a virtual environment has no libtpu, the
one that its JAX requires is installed into .cache. Exit code 0 if everything compiles and training fits into memory.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared import config
from shared.errors import ConfigError, VolleyError
from volley.layout import CACHE, PROJECT, python_of, variables_of
from volley_launch.planning.devices import DEVICES
from volley_python.installing.uv import run_uv

_TIMEOUT_S = 3600
_GIB = 2**30
_ASK_JAX = "from importlib.metadata import requires; print(*(r for r in requires('jax') if r.startswith('libtpu')))"
_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")


@dataclass(frozen=True, slots=True)
class TpuGeneration:
    """A generation of TPUs: memory of a chip in bytes, and slices by libtpu's names."""

    memory: int
    slices: tuple[str, ...]

    def slice_of(self, n_chips: int) -> str:
        """Smallest slice with at least `n_chips` chips. Raises ConfigError."""
        for one in self.slices:
            if math.prod(map(int, one.split("x"))) >= n_chips:
                return one
        raise ConfigError(f"{n_chips} chips are more than the largest known slice has, {self.slices[-1]}")


GENERATIONS = {
    "v5e": TpuGeneration(DEVICES["v5e"].memory, _FLAT),
    "v6e": TpuGeneration(DEVICES["v6e"].memory, _FLAT),
    "v5p": TpuGeneration(DEVICES["v5p"].memory, _CUBES),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make lower", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, metavar="FILE.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the file")
    parser.add_argument("--tpu", choices=GENERATIONS, default="v5e", help="generation (default: v5e)")
    parser.add_argument("--only", choices=("trainer", "rollout"), help="compile only one of the two")
    parser.add_argument("--layers", type=int, default=2, help="layers of the engine's model (default: 2)")
    given = parser.parse_intermixed_args(argv)
    try:
        fits = True
        if given.only != "rollout":
            fits = print_programs(trainer(given.config, given.tpu, given.overrides), GENERATIONS[given.tpu].memory)
        if given.only != "trainer":
            print_programs(rollout(given.config, given.tpu, given.overrides, given.layers))
    except VolleyError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if fits else 1


def trainer(file: Path, tpu: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Programs of a training step, with the bytes of each. Raises ConfigError, Unavailable, VolleyError."""
    loaded = config.load([file], list(overrides)).config
    topology = f"{tpu}:{GENERATIONS[tpu].slice_of(math.prod(loaded.trainer.mesh.shape))}"
    print(f"trainer, mesh {list(loaded.trainer.mesh.shape)} on {topology}", flush=True)
    return _run("trainer", "tools.lower.trainer", [str(file), topology, *overrides], {})


def rollout(file: Path, tpu: str, overrides: Sequence[str], n_layers: int) -> list[dict[str, Any]]:
    """Programs of the engine's step, with a model of `n_layers` layers. Raises as `trainer`."""
    tp_size = config.load([file], list(overrides)).config.rollout.engine.tp_size
    topology = f"{tpu}:{GENERATIONS[tpu].slice_of(tp_size)}"
    print(f"engine, {n_layers} layers over {tp_size} of {topology}", flush=True)
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={tp_size}"}
    module = "tools.lower.engine"
    return _run("rollout", module, [str(file), topology, str(n_layers), *overrides], flags)


def print_programs(programs: Sequence[Mapping[str, Any]], memory: int | None = None) -> bool:
    """Print one line per program. Returns whether the largest fits into `memory` bytes."""
    for program in programs:
        parts = {name: n for name, n in program["bytes"].items() if n}
        sizes = ", ".join(f"{name} {n / 2**20:,.1f}" for name, n in parts.items())
        print(f"  {program['program']}: {sum(parts.values()) / 2**20:,.1f} MiB a chip ({sizes})", end="")
        print(f", {(program['flops'] or 0) / 1e12:.3g} TFLOP, compiled in {program['compile_s']:g} s")
    if memory is None:
        return True
    most = max(sum(program["bytes"].values()) for program in programs)
    print(f"  {'fits' if most <= memory else 'DOES NOT FIT'}: {most / _GIB:.2f} of {memory / _GIB:.0f} GiB")
    return most <= memory


def _run(environment: str, module: str, arguments: Sequence[str], flags: Mapping[str, str]) -> list[dict[str, Any]]:
    variables = {
        **variables_of(environment, cpu=True),
        "PYTHONPATH": os.pathsep.join([str(PROJECT), *_libtpu(environment)]),
        # Without them libtpu queries the cloud for the machine type, and allows one process at a time.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        **flags,
    }
    command = [str(python_of(environment)), "-m", module, *arguments]
    done = subprocess.run(
        command, env=variables, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise VolleyError(f"{module} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return orjson.loads(done.stdout.strip().splitlines()[-1])


def _libtpu(environment: str) -> list[str]:
    """Folders to import libtpu from; none if the environment has it. Raises Unavailable."""
    python = str(python_of(environment))
    if subprocess.run([python, "-c", "import libtpu"], capture_output=True, check=False).returncode == 0:
        return []
    asked = subprocess.run(
        [python, "-c", _ASK_JAX], capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout
    wanted = asked.split(";")[0].strip()
    folder = CACHE / wanted.replace("==", "-").replace(".*", "")
    if not (folder / "libtpu").is_dir():
        print(f"installing {wanted} into {folder}", flush=True)
        command = ["pip", "install", "--no-deps", "--target", str(folder), wanted, "--python", python]
        run_uv(*command, wanted=wanted, timeout_s=_TIMEOUT_S)
    return [str(folder)]


if __name__ == "__main__":
    raise SystemExit(main())
