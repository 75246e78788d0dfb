"""First mistakes: each is answered by one line and a hint, before any service starts and without a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from volley.__main__ import main
from volley.layout import PROJECT

CONFIG = str(PROJECT / "configs/quickstart.yaml")
QUICKSTART = str(PROJECT / "configs/models/quickstart")
TRAIN = ["train", "--config", CONFIG]

_FORM = "override '{}' is not of the form key.path=value\n  "
_OPTION = "unrecognized arguments: --{}\n  settings have no dashes: write {}\n"
MISTAKES = [
    (["trian"], "'trian' is unknown: did you mean train?"),
    (["nothing"], "'nothing' is unknown; commands are quickstart, train, "),
    (["--versoin"], "unknown option --versoin\n  did you mean --version?\n"),
    (["--nothing", "train"], "unknown option --nothing\n  `volley --help` lists the commands; options follow them\n"),
    (["export", "runs/mine"], "missing: FOLDER\n  example: volley export runs/quickstart models/mine; `volley export"),
    (["train", "x.yaml"], "x.yaml: no such folder"),
    (["train"], "neither a run's folder nor --config is given"),
    ([*TRAIN, "--modle", "x"], "unrecognized arguments: --modle"),
    ([*TRAIN, "--trainer.max_steps=abc"], "trainer.max_steps='abc': input should be a valid integer"),
    ([*TRAIN, "trainer.max_step=5"], "unknown key trainer.max_step: did you mean trainer.max_steps?"),
    ([*TRAIN, "trainer.max_steps=true"], "trainer: max_steps=true is not a number"),
    ([*TRAIN, "trainer.max_steps="], "trainer.max_steps has no value"),
    ([*TRAIN, "trainer.max_steps=-3"], "trainer.max_steps=-3: input should be greater than 0"),
    ([*TRAIN, "trainer=5"], "trainer is a section, not 5"),
    ([*TRAIN, "trainr.max_steps=5"], "unknown key trainr: did you mean trainer?"),
    ([*TRAIN, "learning_rate=1"], "unknown key learning_rate: did you mean trainer.optimizer_config.learning_rate or "),
    ([*TRAIN, "algorithm.name=gropo"], "algorithm.name='gropo': did you mean grpo?"),
    ([*TRAIN, "data.env=frozenlake"], "data.env=frozenlake: there is no such environment"),
    ([*TRAIN, "data.env=gsm8k"], "data.env=gsm8k reads its tasks from files, and none is named"),
    ([*TRAIN, "data.env=nothere.py"], "data.env=nothere.py: {cwd}/nothere.py does not exist or is not a file"),
    ([*TRAIN, "data.env={cwd}/empty"], "data.env={cwd}/empty: {cwd}/empty holds no environment"),
    ([*TRAIN, "model.path={cwd}/missing"], "model.path {cwd}/missing is no folder"),
    ([*TRAIN, "model.path=empty"], "model.path {cwd}/empty holds no config.json"),
    ([*TRAIN, "rollout.engine.device=gpu"], "rollout.engine.device gpu: no GPU was found on this machine"),
    ([*TRAIN, "sft.enabled=1"], "unknown key sft.enabled"),
    ([*TRAIN, "run.name", "=", "a"], _FORM.format("run.name") + "write run.name=a without spaces"),
    ([*TRAIN, "run.name", "=a"], _FORM.format("run.name") + "write run.name=a without spaces"),
    ([*TRAIN, "run.trackers=wandb"], "run.trackers='wandb' is not a list\n  write run.trackers=[wandb]"),
    (
        [*TRAIN, "trainer.length_buckets=8"],
        "trainer.length_buckets=8 is not a list\n  write trainer.length_buckets=[8]",
    ),
    ([*TRAIN, "algorithm.name=gspo"], "algorithm.name='gspo': write algorithm.name=gspo-token"),
    ([*TRAIN, "algorithm=grpo"], "algorithm is a section: write algorithm.name=grpo\n"),
    (
        [*TRAIN, "custom_reward_function.path=r.py"],
        "override 'custom_reward_function.path=r.py': it is a key of verl\n  give --reward r.py\n",
    ),
    (
        [*TRAIN, "trainer.total_epochs=15"],
        "override 'trainer.total_epochs=15': it is a key of verl\n  write trainer.max_steps=…; an epoch is tasks div",
    ),
    ([*TRAIN, "output_dir=out"], "override 'output_dir=out': it is a key of TRL\n  write run.dir=out\n"),
    ([*TRAIN, "--num_generations", "4"], _OPTION.format("num_generations", "grpo_config.num_generations=4")),
    (
        [*TRAIN, "--learning-rate", "1e-6"],
        _OPTION.format("learning-rate", "trainer.optimizer_config.learning_rate=1e-6"),
    ),
    (["sft", "tabs.yaml", "--max-steps", "9"], _OPTION.format("max-steps 9", "sft.max_steps=9")),
    ([*TRAIN, "lr=0.01"], "unknown key lr: write trainer.optimizer_config.learning_rate=0.01\n"),
    (
        [*TRAIN, "--epochs", "3"],
        "unrecognized arguments: --epochs\n  settings have no dashes: write trainer.max_steps=…; ",
    ),
    (
        ["train", "x", "--weight", "1"],
        "unrecognized arguments: --weight 1\n  give a reward its weight with --reward FILE",
    ),
    (["train", "x", "--env", "y", "run.name", "a"], _FORM.format("run.name") + "write run.name=a without spaces\n"),
    ([*TRAIN, "--beta=0.04"], _OPTION.format("beta=0.04", "algorithm.beta=0.04; for DPO dpo.beta")),
    (["train", "--model", "x"], "unrecognized arguments: --model\n  the model has no option: write `volley train x`\n"),
    (["train", "x", "--agent", "x.py"], "unrecognized arguments: --agent x.py\n  did you mean --env?\n"),
    (["train", "x", "-data", "p.csv"], "unrecognized arguments: -data p.csv\n  did you mean --data?\n"),
    ([*TRAIN, "-trainer.max_step=4"], "unknown key trainer.max_step: did you mean trainer.max_steps?\n"),
    (["train", "x", "--reward_funcs", "r.py"], "unrecognized arguments: --reward_funcs r.py\n  give --reward r.py\n"),
    (["train", QUICKSTART], f"{QUICKSTART} is a model, not a run\n  add --data FILE --reward FILE.py, or --env FILE\n"),
    (["train", "x", "p.csv", "r.py"], "x is a model, not a run\n  add --data p.csv --reward r.py\n"),
    (["train", "x", "r.py"], "x is a model, not a run\n  add --env r.py, or --data FILE --reward r.py\n"),
    (
        ["train", "--config", "trl.yaml"],
        "config file trl.yaml: num_train_epochs, output_dir, report_to are keys of TRL",
    ),
    (["serve", QUICKSTART, "--device", "gpu"], "--device gpu: no GPU was found on this machine"),
    (["train", "--config", "missing.yaml"], "config file missing.yaml: No such file or directory"),
    (["train", "--config", "empty"], "config file empty: Is a directory"),
    (["train", "--config", "tabs.yaml"], "config file tabs.yaml, line 2 is indented with a tab"),
    (["train", "--config", "list.yaml"], "config file list.yaml holds a list, not a mapping of sections"),
    (["train", "--config", "nothing.yaml"], "config file nothing.yaml is empty"),
    (["train", "--config", "open.yaml"], "config file open.yaml is not valid YAML, line 2: "),
    (["train", "--config", "binary.yaml"], "config file binary.yaml is not text"),
    (["train", "--config", "twice.yaml"], "config file twice.yaml is not valid YAML, line 3: the key 'run' is given"),
    (["report", "missing"], "{cwd}/missing is no folder"),
    (
        ["verify", "quickstart"],
        "quickstart is not the folder of a run: there is no such folder\n  did you mean runs/quickstart?\n",
    ),
    (
        ["quickstart", "--steps", "3"],
        "unrecognized arguments: --steps\n  settings have no dashes: write trainer.max_steps=3",
    ),
    (
        [*TRAIN, "run.name=a/b"],
        "run.name='a/b': string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$'\n  a name",
    ),
    (["report", "runs/quickstat"], "{cwd}/runs/quickstat is no folder\n  did you mean {cwd}/runs/quickstart?\n"),
    (["up", "runs/quickstat"], "runs/quickstat: no such folder\n  did you mean runs/quickstart?\n"),
    (["trajectories", "runs/quick"], "runs/quick is not the folder of a run: there is no such folder\n  did you mean "),
    (["fork", "empty"], "{cwd}/empty is not the folder of a run: it holds no config.yaml\n  give a run's folder, such"),
    (["status", "empty"], "{cwd}/empty is not the folder of a run started here"),
    (["eval", "tabs.yaml"], "tabs.yaml is not the folder of a run"),
    (["env", "test", "missing.py"], "missing.py does not exist"),
    (["env", "test", "tabs.yaml"], "tabs.yaml is no environment"),
    (["sft", "tabs.yaml", "--model", QUICKSTART], "{cwd}/tabs.yaml is not a data file"),
]
FILES = {
    "runs/quickstart/config.yaml": b"{}\n",
    "trl.yaml": b"num_train_epochs: 1\noutput_dir: out\nreport_to: wandb\n",
    "tabs.yaml": b"run:\n\tname: x\n",
    "list.yaml": b"- a\n- b\n",
    "nothing.yaml": b"",
    "open.yaml": b"run: [1\n",
    "binary.yaml": b"\xff\xfe\x00",
    "twice.yaml": b"run:\n  name: a\nrun:\n  name: b\n",
}


@pytest.mark.parametrize(("arguments", "first"), MISTAKES, ids=[" ".join(one[0])[-40:] for one in MISTAKES])
def test_a_mistake_is_answered_by_one_line_and_a_hint(
    arguments: list[str],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "empty").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main([one.replace("{cwd}", str(tmp_path)) for one in arguments])
    assert ended.value.code == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    _, *hint = shown.err.splitlines()
    assert shown.err.startswith(f"volley: {first.replace('{cwd}', str(tmp_path))}")
    assert len(hint) <= 1
    assert all(one.startswith("  ") for one in hint)
    assert "\\n" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before
