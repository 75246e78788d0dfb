"""`volley plan`: published sizes of models, configurations that fit, and those that do not with what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from packages.launch.tests.test_accelerators import machine  # noqa: F401 - a fixture
from shared import config
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.parameters import n_parameters
from shared.published import delta
from tests.support import families
from tests.support.large_models import QWEN3_4B, QWEN3_30B, SMOLLM2
from tests.support.models import tiny_config, write_hf
from volley.__main__ import main
from volley_launch.plan.run_plan import PlanRequest, RunPlan, make
from volley_launch.planning import devices
from volley_launch.planning.quantities import parse_bytes, parse_rate, read_prices

TPU, SMALL = "configs/gsm8k_qwen3_4b_tpu.yaml", "configs/quickstart.yaml"
MOONLIGHT = families.case("moonlight").written
GIB = 2**30


def plan(file: str, *overrides: str, of: Mapping[str, Any] = QWEN3_4B, **asked: Any) -> RunPlan:
    model = ModelConfig.parse(dict(of))
    return make(config.load([file], overrides), model, PlanRequest(**asked))


@pytest.mark.parametrize(
    ("written", "published"),
    [(QWEN3_4B, 4_022_468_096), (QWEN3_30B, 30_532_122_624), (SMOLLM2, 134_515_008)],
)
def test_parameters_are_as_many_as_the_published_models_have(written: Mapping[str, Any], published: int) -> None:
    assert n_parameters(ModelConfig.parse(dict(written))) == published


@pytest.mark.parametrize("name", families.NAMES)
def test_parameters_are_those_of_the_files_of_every_family(name: str) -> None:
    case = families.case(name)
    assert n_parameters(ModelConfig.parse(case.written)) == sum(value.size for value in case.weights.values())


def test_a_run_that_fits_has_every_part() -> None:
    found = plan(
        TPU,
        trainer="v5e:8",
        rollout="v5e:16",
        bandwidth=parse_rate("10Gbit/s"),
        prices={"v5e": 1.5},
        step_s=90.0,
    )
    assert found.refusals == ()
    assert found.trainer is not None
    # libtpu's compiler allocates 12.6 GiB on each chip: docs/accelerators.md.
    assert found.trainer["peak"] / GIB == pytest.approx(12.6, rel=0.05)
    assert found.topology["trainer"]["mesh"] == {"fsdp": 4, "tp": 2}
    assert (found.topology["rollout"]["servers"], found.topology["rollout"]["hosts"]) == (4, 2)
    assert found.rollout is not None
    assert found.rollout["weights"] * 4 == pytest.approx(2 * found.model["parameters"], rel=1e-3)
    assert found.rollout["total"] <= found.rollout["limit"]
    assert found.hand_over is not None
    assert found.hand_over.whole == 2 * found.model["parameters"]
    assert found.hand_over.whole_s == pytest.approx(found.hand_over.whole / 1.25e9)
    assert found.cost is not None
    assert found.cost.per_hour == 1.5 * 24
    assert found.cost.of_run == pytest.approx(1.5 * 24 * 10 * 90 / 3600)
    assert found.disk is not None
    assert found.disk.checkpoint == pytest.approx(14 * found.model["parameters"], rel=1e-3)


ENGINE = ("rollout.engine.device=gpu", "rollout.engine.tp_size=1", "rollout.engine.max_total_tokens=null")
PACKED = ("trainer.micro_batch_tokens=393216", "trainer.train_micro_batch_size=null")


@pytest.mark.parametrize(
    ("overrides", "asked", "reason"),
    [
        (PACKED, {"trainer": "v5e:8"}, "training takes"),
        (("trainer.train_micro_batch_size=256",), {"trainer": "v5e:8"}, "training takes"),
        (("algorithm.beta=0.1", "trainer.train_micro_batch_size=64"), {"trainer": "v5e:8"}, "training takes"),
        (("algorithm.name=ppo", "algorithm.loss_agg_mode=token-mean"), {"trainer": "v5e:8"}, "training takes"),
        ((), {"trainer": "v5e:4"}, "needs 8 devices, and there are 4"),
        (("trainer.mesh.shape=[2,4]",), {"trainer": "v5e:8"}, ""),
        (("trainer.mesh.shape=[3,1]", "trainer.train_micro_batch_size=3"), {"trainer": "v5e"}, "does not divide"),
        (("trainer.mesh.shape=[5,1]",), {"trainer": "v5e"}, "do not divide over fsdp=5"),
        (("trainer.mesh.shape=[16,1]",), {"trainer": "v5e"}, "are on 2 hosts"),
        (("services.trainer.num_processes=3",), {"trainer": "v5e"}, "do not divide over services.trainer.num_proc"),
        (("trainer.mesh.shape=[1,1]", *ENGINE), {"trainer": "h100"}, "training takes"),
        (ENGINE, {"trainer": "v5e:8", "rollout": "h100:1"}, ""),
        (("rollout.engine.tp_size=3",), {"trainer": "v5e:8", "rollout": "v5e:3"}, "do not divide"),
        (("rollout.engine.tp_size=1",), {"trainer": "v5e:8", "rollout": "chip=8GiB"}, "room for 0 tokens"),
        (("services.rollout_replicas=3",), {"trainer": "v5e:8", "rollout": "v5e:8"}, "services.rollout_replicas=3"),
        ((), {"trainer": "v5e:8", "rollout": "h100:8"}, "rollout.engine.device=tpu"),
        (("trainer.attention=splash",), {"trainer": "h100:8", "rollout": "v5e:8"}, "trainer.attention=splash"),
        (("rollout.engine.max_total_tokens=9000000",), {"trainer": "v5e:8"}, "max_total_tokens=9000000 takes"),
        (("grpo_config.num_generations=60000", "trainer.groups_per_step=1"), {"trainer": "v5e:8"}, "a group of 60000"),
    ],
)
def test_the_changes_that_a_refusal_names_are_enough(
    overrides: tuple[str, ...], asked: dict[str, str], reason: str
) -> None:
    found = plan(TPU, *overrides, **asked)
    assert bool(found.refusals) == bool(reason)
    assert any(reason in one.reason for one in found.refusals) or not reason
    for one in found.refusals:
        for way in one.change.split(" or "):
            settings = [one for one in re.findall(r"[\w.]+=(?:\[.*?\]|[^\s,]+)", way) if "HOST" not in one]
            assert settings, one.change
            later = plan(TPU, *overrides, *settings, **asked)
            assert one.reason not in [other.reason for other in later.refusals], way


def test_a_mixture_of_experts_names_adapters_or_more_chips() -> None:
    found = plan(TPU, of=QWEN3_30B, trainer="v5p", rollout="v5p:8")
    assert [one.change for one in found.refusals if "training" in one.reason] == []
    small = plan(TPU, of=QWEN3_30B, trainer="v5e", rollout="v5p:8")
    (training,) = [one for one in small.refusals if one.reason.startswith("training takes")]
    assert "trainer.lora.rank=16" in training.change
    assert "services.trainer.num_processes=" in training.change
    experts = plan(TPU, "trainer.lora.target_modules=[gate_proj]", of=QWEN3_30B, trainer="v5p", rollout="v5p:8")
    assert any("target_modules" in one.reason for one in experts.refusals)


def test_adapters_have_a_base_that_travels_once() -> None:
    found = plan(TPU, "trainer.lora.rank=16", trainer="v5e:8")
    assert found.hand_over is not None
    assert found.hand_over.base == 2 * found.model["parameters"]
    assert found.hand_over.whole == 4 * found.model["trained"] < found.hand_over.base / 10
    assert found.hand_over.delta is None
    assert found.disk is not None
    assert found.disk.checkpoint == pytest.approx(12 * found.model["trained"], rel=0.01)


def test_supervised_runs_have_no_rollout_servers(tmp_path: Path) -> None:
    pairs = f"sft.train={tmp_path / 'pairs.jsonl'}"
    dpo = plan(TPU, "mode=dpo", pairs, "sft.batch_size=8", trainer="v5p:8")
    assert (dpo.rollout, dpo.hand_over, dpo.topology["rollout"]) == (None, None, None)
    assert dpo.trainer is not None
    assert dpo.trainer["kept"]["reference"] == dpo.trainer["kept"]["parameters"]
    sft = plan(TPU, "mode=sft", pairs, "sft.batch_size=8", trainer="v5p:8")
    assert sft.trainer is not None
    assert "reference" not in sft.trainer["kept"]
    assert sft.cost is None
    wide = plan(TPU, "mode=sft", pairs, "trainer.mesh.shape=[16,1]", trainer="v5e")
    assert any("trained by one process" in one.change for one in wide.refusals)
    assert {name for names in sft.topology["processes"].values() for name in names} == {"trainer"}


def test_other_servers_are_listed(tmp_path: Path) -> None:
    urls = "services.rollout_urls=[http://a.internal:8102,http://b.internal:8102]"
    teacher = ("algorithm.teacher_kl_coef=0.1", "services.orchestrator.teacher.url=http://teacher.internal:1")
    found = plan(TPU, urls, *teacher, trainer="v5e:8")
    assert found.topology["processes"]["a.internal"] == ["rollout-0"]
    assert found.topology["external"]["services.orchestrator.teacher"] == "http://teacher.internal:1"
    assert found.topology["rollout"]["servers"] == 2
    engine = ("rollout.engine.kind=vllm", "rollout.engine.url=http://vllm.internal:1", "rollout.engine.device=cpu")
    other = plan(TPU, *engine, trainer="v5e:8")
    assert other.rollout is None
    assert any("vllm" in note for note in other.notes)


def test_processes_of_one_machine_share_its_memory() -> None:
    small = ("model.dtype=bfloat16", "trainer.train_micro_batch_size=8", "sft.max_steps=0")
    fits = plan(SMALL, *small, of=SMOLLM2, trainer="cpu=12GiB", rollout="cpu=12GiB")
    assert fits.refusals == ()
    found = plan(SMALL, *small, "services.rollout_replicas=9", of=SMOLLM2, trainer="cpu=12GiB", rollout="cpu=12GiB")
    (one,) = found.refusals
    assert "9 rollout servers" in one.reason
    assert "services.rollout_replicas=" in one.change


def test_accelerators_of_this_machine_are_found(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    found = devices.local("tpu", machine)
    assert (found.type.name, found.count) == ("v5e", 8)
    monkeypatch.setenv("PATH", str(machine))
    with pytest.raises(ConfigError, match="not known"):
        devices.local("gpu", machine)
    smi = machine / "nvidia-smi"
    of = (
        "81559, Disabled, 0, GPU-a, NVIDIA H100 80GB HBM3",
        *(f"23034, [N/A], {i}, GPU-{i}, NVIDIA L4" for i in (1, 2, 3)),
    )
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in of), encoding="utf-8")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine}:/bin")
    assert devices.local("gpu", machine).type.memory == 23034 * 2**20
    with pytest.raises(ConfigError, match="has no TPU") as error:
        devices.local("tpu", machine / "dev")
    assert "--trainer" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("text", "named"),
    [("h900:8", "known: v4, v5e"), ("v5e:0", "at least one"), ("v5e:x", "names no devices"), ("a=9furlongs", "amount")],
)
def test_unknown_devices_are_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        devices.parse(text, "gpu")
    assert named in f"{error.value.detail} {error.value.hint}"


def test_the_page_names_every_known_device() -> None:
    page = Path("docs/memory.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in devices.DEVICES)


def test_devices_have_the_memory_that_is_given() -> None:
    assert devices.parse("mine=24GiB:4", "tpu").type == devices.DeviceType("mine", "tpu", 24 * GIB)
    assert devices.parse("h100=94GB", "tpu").type.platform == "gpu"
    assert devices.parse("H100", "tpu").type == devices.DEVICES["h100"]


def test_amounts_are_read() -> None:
    assert [parse_bytes(text) for text in ("24GiB", "1.5 KB", "17")] == [24 * GIB, 1500, 17]
    assert [parse_rate(text) for text in ("200Mbit/s", "10Gbps", "1.2GB/s", "8 kbit")] == [25e6, 1.25e9, 1.2e9, 1000]
    for wrong in ("fast", "10", "", "-1Gbit/s", "0GB/s"):
        with pytest.raises(ConfigError):
            parse_rate(wrong)


@pytest.mark.parametrize("text", ["v5e: cheap", "v5e: -1", "v5e: .nan", "v5e: 1\nV5E: 2", "- 3", "v5e: true"])
def test_prices_that_are_no_numbers_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        read_prices(file)


def test_a_device_without_a_price_is_named() -> None:
    with pytest.raises(ConfigError, match="no v5e"):
        plan(TPU, trainer="v5e:8", prices={"h100": 3.0})


def test_a_delta_has_the_estimated_size() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**16, 1 << 20, np.uint16)
    after = before.copy()
    at = rng.random(before.size) < 0.02
    after[at] ^= rng.choice(np.array([1, 3], np.uint16), int(at.sum()))
    encoded = delta.encode(before.tobytes(), after.tobytes(), 2)
    found = plan(TPU, trainer="v5e:8", moved=0.02).hand_over
    assert encoded is not None
    assert found is not None
    assert found.delta is not None
    assert found.delta / (found.whole / 2) == pytest.approx(len(encoded) / before.size, rel=0.25)


def test_the_command_plans_from_a_config_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf(tmp_path / "model", tiny_config())
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    asked = ["plan", "--config", SMALL, f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'runs'}"]
    assert code(*asked, "--json") == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["refusals"] == []
    assert found["trainer"]["peak"] > 0
    assert found["disk"]["total"] > 0
    assert code(*asked) == 0
    assert "keys and values" in capsys.readouterr().out
    assert code(*asked, "--trainer", "v5e", "trainer.mesh.shape=[3,1]", "--json") == 1
    assert not orjson.loads(capsys.readouterr().out)["fits"]
    assert code(*asked, "--step-s", "nan") == 2
    assert not (tmp_path / "runs").exists()


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
