"""`make lower`: real compilations for TPUs that are not here, and what is made of their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shared.errors import ConfigError
from tests.support import models
from tools.lower.__main__ import GENERATIONS, print_programs
from volley.layout import PROJECT, python_of, variables_of

TINY = models.tiny_config(vocab_size=1024, hidden_size=256, intermediate_size=512)


def test_the_largest_program_decides_whether_training_fits(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [
        {"program": "gradient", "bytes": {"arguments": 3, "temporary": 4}, "flops": 1e12, "compile_s": 1.0},
        {"program": "optimizer", "bytes": {"arguments": 5, "results": 0}, "flops": None, "compile_s": 1.0},
    ]
    assert print_programs(programs, 7)
    assert not print_programs(programs, 6)
    assert print_programs(programs)
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_smallest_slice_with_enough_chips_is_taken() -> None:
    assert [GENERATIONS["v5e"].slice_of(n) for n in (1, 4, 5, 256)] == ["2x2", "2x2", "2x4", "16x16"]
    assert [GENERATIONS["v5p"].slice_of(n) for n in (4, 8)] == ["2x2x1", "2x2x2"]
    with pytest.raises(ConfigError, match="257 chips are more"):
        GENERATIONS["v6e"].slice_of(257)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_and_engine_compile_for_tpus(tmp_path: Path) -> None:
    """A mesh of both axes, the engine over four chips with its paged attention and pages of 16 tokens, all in bfloat16;
    and PPO on packed rows.
    """
    models.write_hf(tmp_path / "model", TINY)
    sizes = {"context_length": 256, "max_running_requests": 16, "max_prefill_tokens": 64}
    config = {
        "run": {"name": "lowered", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16", "remat": "decoder"},
        "data": {"env": "none"},
        "grpo_config": {"num_generations": 4},
        "trainer": {"max_steps": 1, "groups_per_step": 2, "length_buckets": [256], "mesh": {"shape": [2, 2]}},
        "rollout": {"engine": {"device": "tpu", "tp_size": 4, **sizes}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    said = lower(tmp_path / "run.yaml")
    for line in ("trainer, mesh [2, 2] on v5e:2x2", "gradient: ", "optimizer: ", "  fits: ", "over 4 of v5e:2x2"):
        assert line in said
    for line in ("prefill of 64 tokens: ", "decode of 16 tokens: "):
        assert line in said
    packed = ("algorithm.name=ppo", "trainer.micro_batch_tokens=1024", "trainer.attention=splash")
    assert "  fits: " in lower(tmp_path / "run.yaml", "--only", "trainer", "--tpu", "v6e", *packed)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_lowers_for_gpus(tmp_path: Path, dtype: str) -> None:
    """Each layer attends by one kernel; a loop whose end only the device knows would wait for the host at each turn."""
    models.write_hf(tmp_path / "model", TINY)
    config = {
        "run": {"name": "lowered", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "model"), "dtype": dtype},
        "data": {"env": "none"},
        "rollout": {"engine": {"device": "gpu", "context_length": 256, "max_running_requests": 16}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(python_of("rollout")), "-m", "tools.lower.engine", str(tmp_path / "run.yaml"), "gpu", "3"]
    environment = variables_of("rollout", cpu=True) | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout.splitlines()[-1])
    assert [program["kernels"] for program in programs] == [{"paged_attention": 3}] * 2
    assert all(program["loops"] < 3 for program in programs)  # fewer than layers: the sampler has some


def lower(file: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "tools.lower", str(file), *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
