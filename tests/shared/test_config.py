"""Configuration: every committed file parses, and every mistake is one line that names it."""

import functools
from pathlib import Path

import pytest

from shared import config
from shared.errors import ConfigError
from shared.run.shares import configured, weights_of
from shared.run_config import run_model
from shared.section import Section
from tests.support.committed import FOR_OWN_DATA, ROOT, every_config

_TEACHERS, _TEACHER = "services.orchestrator.teachers", "services.orchestrator.teacher"
MINIMAL = "model: {path: m}\ndata: {env: frozen_lake}\n"


def write(tmp_path, text, name="c.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@every_config
def test_every_committed_config_parses(path):
    assert config.load([path]).config.run.name


@pytest.mark.parametrize("path", FOR_OWN_DATA, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_committed_config_for_own_data_parses(path):
    assert config.load([path], ["model.path=m", "data.env=none"]).config.run.name


def test_a_mixture_is_weights_or_more_beside_the_main_environment(tmp_path):
    path = write(tmp_path, "model: {path: m}\ndata: {env: frozen_lake, env_config: {size: 5}, mixture: {sokoban: 3}}\n")
    data = config.load([path]).config.data
    assert [(name, one.weight) for name, one in data.environments.items()] == [("frozen_lake", 1.0), ("sokoban", 3.0)]
    assert data.environments["frozen_lake"].env_config == {"size": 5}
    data = config.load([path], ["data.mixture={frozen_lake: {weight: 2, min_share: 0.5}, sokoban: 9}"]).config.data
    assert weights_of(configured(data)) == {"frozen_lake": 1, "sokoban": 1}
    assert data.environments["frozen_lake"].env_config == {"size": 5}


def test_later_files_and_overrides_win(tmp_path):
    first = write(tmp_path, MINIMAL + "trainer: {max_steps: 1, groups_per_step: 2}\n")
    second = write(tmp_path, "trainer: {max_steps: 3}\n", "d.yaml")
    loaded = config.load([first, second], ["trainer.groups_per_step=4", "data.train=a/b.jsonl"])
    assert (loaded.config.trainer.max_steps, loaded.config.trainer.groups_per_step) == (3, 4)
    assert loaded.config.data.train == Path("a/b.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: a}\nrun: {name: b}\n", r"not valid YAML, line 2: the key 'run' is given twice"),
        ("run:\n  name: a\n  seed: 1\n  name: b\n", r"line 4: the key 'name' is given twice"),
        ("run: &run\n  name: {x: *run}\n", "is nested too deeply, or contains itself"),
    ],
)
def test_a_key_that_is_there_twice_and_a_part_of_itself_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        config.load([write(tmp_path, text)])


def test_what_is_wrong_in_a_file_is_told_with_its_name(tmp_path):
    path = write(tmp_path, MINIMAL + "\nbogus: 1\n")
    with pytest.raises(ConfigError, match=rf"^config file {path}: unknown key bogus"):
        config.load([path])


def test_model_and_data_are_found_beside_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "there" / "models" / "mine").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    file = tmp_path / "there" / "run.yaml"
    file.write_text("run: {name: x}\nmodel: {path: models/mine}\ndata: {env: letter_count}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    assert config.load([file]).config.model.path == str(tmp_path / "there" / "models" / "mine")
    assert config.load([file], ["model.path=models/other"]).config.model.path == "models/other"
    (tmp_path / "here" / "models" / "mine").mkdir(parents=True)
    assert config.load([file]).config.model.path == "models/mine"


def test_the_written_config_is_the_same_config(tmp_path):
    loaded = config.load([write(tmp_path, MINIMAL)], ["run.seed=3"])
    again = config.load([write(tmp_path, loaded.to_yaml(), "again.yaml")])
    assert again.config == loaded.config
    assert again.digest == loaded.digest


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_step=3"], r"unknown key trainer\.max_step: did you mean trainer\.max_steps\?$"),
        (["nonsense.key=3"], "unknown key nonsense"),
        (["trainer.nonsense=3"], r"unknown key trainer\.nonsense \(valid here: max_steps, "),
        (["groups_per_step=3"], r"unknown key groups_per_step: did you mean trainer\.groups_per_step\?$"),
        (["+trainer.max_steps=3"], r"\+ before a key is Hydra's \(write trainer\.max_steps=…"),
        (["++trainer.total_training_steps=3"], r"\+\+ before a key is Hydra's \(write trainer\.max_steps=…"),
        (["~trainer.lora"], r"is not of the form key\.path=value"),
        (["actor_rollout_ref.actor.optim.lr=1e-6"], r"verl \(write trainer\.optimizer_config\.learning_rate=1e-6\)$"),
        (["actor_rollout_ref.actor.strategy=fsdp"], r"actor_rollout_ref is a section of verl \(docs/migration\.md"),
        (["max_completion_length=9"], r"TRL \(write grpo_config\.max_response_length=9\)$"),
        (["per_device_train_batch_size=9"], r"TRL \(write trainer\.groups_per_step=…; it counts prompts"),
        (["max_prompt_length=9"], r"TRL \(write rollout\.engine\.context_length=…; it bounds"),
        (["num_train_epochs=9"], r"TRL \(write trainer\.max_steps=…; an epoch is"),
        (["report_to=wandb"], r"TRL \(write run\.trackers=…; a list, such as \[wandb\]\)$"),
        (["scale_rewards=none"], r"TRL \(write algorithm\.name=drgrpo\)$"),
        (["scale_rewards=batch"], r"TRL \(write algorithm\.name=…; grpo divides"),
        (["logging_steps=1"], r"TRL \(leave it out: every step is recorded\)$"),
        (["reward_funcs=r.py"], r"TRL \(give --reward r\.py\)$"),
        (["loss_type=dr_grpo"], r"TRL \(write algorithm\.name=drgrpo\)$"),
        (["algorithm.loss_type=dapo"], r"loss_type is a key of TRL \(write algorithm\.name=grpo; DAPO's clipping"),
        (["grpo_config.beta=0.1"], r"beta is a key of TRL \(write algorithm\.beta=0\.1; for DPO dpo\.beta\)$"),
        (["trainer.loss_algo=rloo"], r"loss_algo is a key of Tunix \(write algorithm\.name=rloo\)$"),
        (["orchestrator.eval_every_n_steps=0"], r"greater than 0 \(for none, write orch.*eval_every_n_steps=null\)$"),
        (["trainer.groups_per_step=0"], r"input should be greater than 0$"),
        (["algorithm=gspo"], r"algorithm is a section: write algorithm\.name=gspo-token$"),
        (["trainer.max_steps=many"], "trainer.max_steps='many': input should be a valid integer$"),
        (["trainer.max_steps=0"], "trainer.max_steps=0"),
        (["trainer.length_buckets=[]"], r"trainer\.length_buckets=\[\]: tuple should have at least 1 item"),
        (["rollout.sampling.temperature=1e-38"], r"rollout\.sampling\.temperature"),
        (["rollout.sampling.temperature=1e4"], r"rollout\.sampling\.temperature"),
        (["rollout.sampling.top_p=1e-9"], r"rollout\.sampling\.top_p"),
        (["rollout.sampling.top_k=0"], "top_k=0 keeps no token"),
        (["rollout.sampling.top_k=-2"], r"rollout\.sampling\.top_k"),
        (["algorithm.epsilonn=1"], r"unknown key algorithm\.epsilonn: did you mean algorithm\.epsilon\?$"),
        (["algorithm.name=ppo", "algorithm.gae_lambda=2"], "algorithm.gae_lambda=2"),
        (["algorithm.name=grpo", "algorithm.gamma=1"], "unknown key algorithm.gamma"),
        (["grpo_config.epsilon=0.1"], r"unknown key grpo_config.epsilon: did you mean algorithm\.epsilon\?"),
        (["grpo_config.num_generations=1"], "grpo compares the episodes of a task with each other"),
        (["services.env.sandbox.kind=box"], "services.env.sandbox.kind='box': unknown .valid: process, container"),
        (["services.env.sandbox.kind=container"], "services.env.sandbox.image is missing"),
        (["services.env.sandbox.image=a"], "services.env.sandbox.kind is missing"),
        (["algorithm.name=magic"], "algorithm.name='magic': unknown .valid: grpo, ppo"),
        (["algorithm.name=gropo"], r"algorithm\.name='gropo': did you mean grpo\? \(valid: grpo, ppo"),
        (["algorithm=grpo"], "algorithm is a section: write algorithm.name=grpo$"),
        (
            ["algorithm.epsilon=null", "algorithm.sampler_is=token", "grpo_config.num_iterations=2"],
            "how far the policy",
        ),
        (["algorithm.epsilon=null", "algorithm.epsilon_c=3"], "epsilon_c=3.0 has no effect"),
        (["algorithm.name=dppo", "algorithm.sampler_is=token"], r"unknown key algorithm\.sampler_is"),
        (["algorithm.name=gdpo"], r"algorithm\.reward_components"),
        (["algorithm.name=gdpo", "algorithm.reward_components.a=1", "algorithm.credit=turn"], "gdpo reads"),
        (["algorithm.name=maxrl", "grpo_config.num_generations=1"], "maxrl compares the episodes"),
        (["algorithm.name=mopd", f"{_TEACHERS}.frozen_lake.url=http://t", "algorithm.ratio_bounds=[2,3]"], "include 1"),
        (["algorithm.name=mopd", f"{_TEACHERS}.frozen_lake.url=http://t", "algorithm.credit=turn"], "outcome_coef"),
        (["algorithm.name=mopd", f"{_TEACHERS}.chess.url=http://t"], r"teachers\.chess: the run has no such"),
        (["algorithm.sampler_is_threshold=0.01"], r"algorithm\.sampler_is_threshold=0\.01"),
        (["trainer.optimizer_config.b2=1"], r"trainer\.optimizer_config\.b2=1"),
        (
            ["algorithm.name=dapo", "algorithm.overlong_buffer=9", "algorithm.overlong_length=9"],
            "penalizes every episode",
        ),
        (
            ["algorithm.name=dapo", "algorithm.overlong_buffer=2", "orchestrator.max_turns=3"],
            "overlong_length: how many",
        ),
        (
            ["algorithm.name=reinforce_plus_plus", "algorithm.baseline=group", "algorithm.gamma=0.5"],
            "cannot be combined",
        ),
        (
            ["algorithm.name=ppo", "grpo_config.num_generations=1", "algorithm.reward_normalization.method=mean_std"],
            "every reward becomes 0",
        ),
        (["algorithm.teacher_kl_coef=0.1"], r"needs a teacher: set services\.orchestrator\.teacher\.url"),
        (["algorithm.name=on_policy_distillation"], r"algorithm\.teacher_kl_coef=1 needs a teacher"),
        (["algorithm.name=on_policy_distillation", "algorithm.credit=turn"], "credit=turn applies to rewards"),
        (["algorithm.name=on_policy_distillation", "algorithm.teacher_kl_coef=0"], "teacher_kl_coef=0"),
        (["services.orchestrator.teacher.url=10.0.0.7"], r"teacher\.url.*must be an http or https address"),
        ([f"{_TEACHER}.url=self"], r"orchestrator\.teacher: url=self needs templates"),
        ([f"{_TEACHER}.url=self", f"{_TEACHER}.templates=[' ']"], r"templates\.0: tells the teacher nothing"),
        ([f"{_TEACHER}.url=self", f"{_TEACHER}.templates=['{{prompt}} ']"], "tells the teacher nothing"),
        ([f"{_TEACHER}.url=http://t", f"{_TEACHER}.templates=['{{answer}}']"], r"the placeholder \{answer\}, but only"),
        ([f"{_TEACHER}.url=http://t", f"{_TEACHER}.templates=['{{expected:>9}}']"], r"placeholder \{expected\}, but"),
        ([f"{_TEACHER}.url=http://t", f"{_TEACHER}.templates=['{{expected.real}}']"], r"placeholder \{expected\.real"),
        ([f"{_TEACHER}.url=http://t", f"{_TEACHER}.templates=['{{']"], "is no template: Single '{' encountered"),
        (
            [f"{_TEACHER}.url=self", f"{_TEACHER}.templates=['{{sibling}}']", f"{_TEACHER}.model=m"],
            "model is of another server, but url=self are the run's own",
        ),
        (["algorithm.epsilon=null"], "nothing bounds the ratio to the policy that sampled"),
        (["trainer.max_steps"], "not of the form key.path=value"),
        (
            ["trainer.groups_per_step=100001"],
            "groups_per_step=100001 is more than 100000: a checkpoint holds a ledger line of each group",
        ),
        (["run.name=../x"], "run.name"),
        (["trainer.mesh.shape=[1]"], "trainer.mesh"),
        (["data.mixture.sokoban.wieght=3"], r"unknown key data\.mixture\.sokoban\.wieght"),
        (["data.mixture.sokoban=-1"], r"data\.mixture\.sokoban\.weight"),
        (["data.mixture.sokoban=lots"], r"data\.mixture\.sokoban"),
        (["data.mixture.frozen_lake=0"], "gives no environment a weight above 0"),
        (
            ["data.mixture.sokoban.min_share=0.6", "data.mixture.frozen_lake.min_share=0.5"],
            "add up to 1.1, more than 1",
        ),
        (["data.mixture.sokoban={weight: 0, min_share: 0.5}"], r"data\.mixture\.sokoban\.min_share needs a weight"),
        (["data.mixture.frozen_lake.env_config.size=3"], r"data\.mixture\.frozen_lake: .* into data\.env_config"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config.load([write(tmp_path, MINIMAL)], overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", ""])
def test_a_bad_file_is_named(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=str(path)):
        config.load([path])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        config.load([tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("configs/sokoban.yaml", "recipes/sokoban/config.yaml"),
        ("configs/smollm2_sentences.yaml", "recipes/short_sentences/config.yaml"),
        ("recipes/sokobn/config.yaml", "recipes/sokoban/config.yaml"),
        ("configs/quickstrat.yaml", "configs/quickstart.yaml"),
    ],
)
def test_a_missing_file_is_found_under_another_name(monkeypatch, path, meant):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as raised:
        config.load([path])
    assert raised.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("redis_url", "redis://:hunter2hunter2@host:1/0"),
        ("redis_url", "rediss://user:hunter2/hunter2@host:1"),
        ("redis_url", "redis://host:1/0?password=hunter2hunter2"),
        ("env.url", "http://user:hunter2hunter2@host"),
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(tmp_path, key, url):
    with pytest.raises(ConfigError, match=rf"services\.{key}: holds a password.*redis_password_file") as caught:
        config.load([write(tmp_path, MINIMAL)], ["services.env.port=1", f"services.{key}={url}"])
    assert "hunter2" not in str(caught.value)


def leaves(model, prefix=()):
    """Every key of the configuration with a default, as its path."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaves(field.annotation, (*prefix, name))
        elif not field.is_required():
            yield (*prefix, name)


LEAVES = [".".join(path) for path in leaves(run_model())]


def test_all_keys_are_walked():
    assert len(LEAVES) > 80
    assert {"services.rollout.port", "services.limits.grace_s", "trainer.mesh.shape", "sft.optimizer_config.b2"} <= set(
        LEAVES
    )


@pytest.mark.parametrize("key", LEAVES)
def test_naming_one_key_leaves_all_others_at_their_defaults(key):
    plain = run_model().model_validate({"model": {"path": "m"}, "data": {"env": "frozen_lake"}}).model_dump(mode="json")
    value = functools.reduce(lambda tree, part: tree[part], key.split("."), plain)
    given = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
    required = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}}
    named = {**given, **{name: {**section, **given.get(name, {})} for name, section in required.items()}}
    assert run_model().model_validate(named).model_dump(mode="json") == plain


def test_naming_the_address_of_a_service_keeps_its_port(tmp_path):
    loaded = config.load(
        [write(tmp_path, MINIMAL)], ["services.rollout.url=http://here:8102", "services.trainer.host=0.0.0.0"]
    )
    services = loaded.config.services
    assert (services.env.port, services.rollout.port, services.orchestrator.port, services.trainer.port) == (
        8101,
        8102,
        8103,
        8104,
    )


@pytest.mark.parametrize("more", ["", "run: {name: '${data.env}'}\n"], ids=["plain", "referring"])
def test_a_list_and_a_mapping_of_one_key_name_where_they_meet(tmp_path, more):
    first = write(tmp_path, MINIMAL.replace("frozen_lake", "frozen_lake, env_config: {sizes: [1]}") + more)
    second = write(tmp_path, "data: {env_config: {sizes: {a: 1}}}\n", "d.yaml")
    key = r"data\.env_config\.sizes: a list and a mapping"
    with pytest.raises(ConfigError, match=f"config file {second} cannot be used: {key}"):
        config.load([first, second])
    with pytest.raises(ConfigError, match=rf"override 'data\.env_config\.sizes\.a=1' cannot be used: {key}"):
        config.load([first], ["data.env_config.sizes.a=1"])


@pytest.mark.parametrize("levels", [50, 300, 400, 2000])
def test_a_deep_tree_is_read_or_refused(tmp_path, levels):
    deep = f"data: {{env: frozen_lake, env_config: {'{a: ' * levels}1{'}' * levels}}}\n"
    path = write(tmp_path, "model: {path: m}\n" + deep)
    if levels == 50:
        assert "a: 1" in config.load([path]).to_yaml()
    else:
        with pytest.raises(ConfigError, match=f"config file {path} is nested too deep"):
            config.load([path])


def test_a_value_may_refer_to_another(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: x}\ndata: {env: '${run.name}'}\nrun: {name: lake}\n", encoding="utf-8")
    assert config.load([path]).config.data.env == "lake"


@pytest.mark.parametrize("text", ["2024-07-26", "'2024-07-26'"])
def test_a_date_may_stand_without_quotes(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(f"run: {{name: a, date: {text}}}\nmodel: {{path: m}}\ndata: {{env: e}}\n", encoding="utf-8")
    assert str(config.load([file]).config.run.date) == "2024-07-26"
