"""Every cell of the notebooks runs, on small models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml

from tests.support.foreign import environment
from tests.support.stack import training
from volley.layout import PROJECT

PACKAGES = ["pandas>=2.2", "polars>=1.20", "pyarrow>=20", "matplotlib>=3.10", "nbclient>=0.10", "ipykernel>=6.29"]
SMALL = {
    "model": {"initial_weights": "random"},
    "grpo_config": {"num_generations": 4, "max_response_length": 8},
    "trainer": {"max_steps": 100_000, "groups_per_step": 2, "length_buckets": [512]},
    "rollout": {"engine": {"context_length": 512, "max_running_requests": 8, "precompile_token_paddings": [512]}},
    "data": {"n_eval_tasks": 2},
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def executed(notebook: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """Execute a notebook in `folder`; return what each of its code cells has printed or shown."""
    python = environment("notebook", PACKAGES)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    known = {"PYTHONPATH": f"{site}:{PROJECT}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    known |= {"MPLBACKEND": "agg", "HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    known["XDG_STATE_HOME"] = os.environ["XDG_STATE_HOME"]  # with the key that marks the run as ours
    program = [sys.executable, "-c", "from nbclient.cli import main; main()", "--timeout", "400"]
    command = [*program, "--output", str(folder / "run"), str(PROJECT / "examples/notebooks" / notebook)]
    done = subprocess.run(command, cwd=folder, env=known | variables, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    cells = [one for one in orjson.loads((folder / "run.ipynb").read_bytes())["cells"] if one["cell_type"] == "code"]
    assert all(one["execution_count"] is not None for one in cells)
    return [str(one["outputs"]) for one in cells]


def test_a_notebook_runs_on_a_live_run(tmp_path: Path) -> None:
    changes = ("trainer.max_steps=400", "services.env.unsandboxed=[compass]", "data.n_eval_tasks=2")
    with training(tmp_path, *changes) as going:
        going.wait_for(r"^step +1/", 900)
        executed("run_from_python.ipynb", tmp_path, {"RUN": str(going.folder.path), "SESSIONS": "8"})


def test_a_notebook_on_one_tpu_host_starts_and_then_continues_its_run(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    variables = {"MODEL": str(PROJECT / "configs/models/agent"), "DATA": str(tmp_path / "rows.jsonl")}
    variables |= {"CONFIG": str(tmp_path / "small.yaml"), "RUN": str(tmp_path / "runs/small")}
    variables["HOURS"] = "0.05"
    for session in (1, 2):
        told = executed("tpu_gsm8k.ipynb", tmp_path, variables)
        assert "stopped" in told[3]
        assert "each trained exactly once" in told[6]
        exported = sorted((tmp_path / "runs").glob("small-after-*-steps/model.safetensors"))
        assert len(exported) == session
