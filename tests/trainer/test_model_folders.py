"""Layouts of model folders: the trainer loads what transformers loads, or refuses the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from services.trainer.backend.assembly import check_vocabulary
from services.trainer.learner.scoring import params_of
from services.trainer.models import family
from services.trainer.models.initial_weights import FileLeaves, leaves_of
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.hub import check_weights
from shared.models.weight_files import weight_files
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from tests.support import model_folders, models
from tests.support.tokenizer import FOLDER as TOKENIZER

EXPECTED = json.loads((model_folders.FIXTURES / "expected.json").read_text(encoding="utf-8"))["loads"]
REFUSED = {
    # transformers 4 and 5, or transformers with and without peft, read these differently
    "tied, lm_head differs": r"lm_head\.weight differs",
    "tied, the embeddings left out": r"lacks the tensor model\.embed_tokens\.weight",
    "adapters of another base beside model.safetensors": "volley model get ADAPTERS",
    # transformers fills these with random numbers
    "lm_head left out": r"lacks the tensor lm_head\.weight",
    "a matrix left out": r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight",
    # transformers takes the last shard's
    "a tensor in two shards": "both hold the tensor",
    # transformers takes the first name in alphabetical order
    "all with and without model.": r"model\.embed_tokens\.weight, .*also embed_tokens\.weight",
    "a matrix with and without model.": r"also layers\.0\.self_attn\.q_proj\.weight",
    "the norm with and without model.": r"also norm\.weight",
    "the embeddings with and without model.": r"also embed_tokens\.weight",
    "a matrix with model.model.": r"also model\.model\.layers\.0\.self_attn\.q_proj\.weight",
    "the norm with model.model.": r"also model\.model\.norm\.weight",
    "lm_head with and without model.": r"also model\.lm_head\.weight",
    "tied, another lm_head with model.": r"lm_head\.weight differs",
    # transformers reads these, and this project does not
    "lm_head with model. only": r"lacks the tensor lm_head\.weight",
    "a matrix without model.": r"lacks the tensor model\.layers\.0\.self_attn\.q_proj\.weight",
    # transformers converts these, and loses the scale or a part of the numbers
    "a matrix in int8": "numbers of type I8",
    "a matrix of booleans": "numbers of type BOOL",
    "a matrix in float8": "numbers of type F8_E4M3",
    "a matrix in complex64": "numbers of type C64",
    "the norm's old name": r"lacks the tensor model\.norm\.weight",
    "pytorch_model.bin alone": r"only pytorch_model\.bin \(convert it",
    "another file named in config.json": "transformers_weights",
    "names without model.": "lacks the tensor",
    "a matrix in integers": "numbers of type I32",
    # transformers refuses these as well
    "an empty folder": "nothing that looks like weights",
    "an index without shards": "lacks model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
    "an index with one of two shards": "lacks model-00002-of-00002.safetensors, which",
    "a damaged index": r"index\.json is no index of tensors",
    "a file that was cut off": "its download was cut off",
    "a broken link": "a broken link",
    "a matrix transposed": r"q_proj\.weight has shape \[16, 32\]",
    "tied, lm_head of another shape": r"lm_head\.weight differs",
    "an empty matrix": r"up_proj\.weight has shape \[0, 16\]",
    "a scalar norm": r"norm\.weight has shape \[\]",
    "the norm as a matrix": r"norm\.weight has shape \[1, 16\]",
    "a flat matrix": r"q_proj\.weight has shape \[512\]",
    "a matrix of another shape": r"up_proj\.weight has shape \[23, 16\]",
    "Git LFS pointers for shards": "model-00002-of-00002.safetensors is a pointer of Git LFS",
    "a Git LFS pointer": "git lfs pull",
    "an empty file": r"model\.safetensors cannot be read",
    "model_ema.safetensors alone": "only model_ema.safetensors .*rename it",
    "model.fp16.safetensors alone": "only model.fp16.safetensors",
    "consolidated.safetensors alone": "the original format",
    "consolidated.00.pth alone": "the original format",
    "shards without an index": "only model-00001-of-00002.safetensors",
    "weights in a folder below": r"try model\.path=.*/weights",
    "model.gguf alone": r"only model\.gguf .*volley model get",
    "a download in progress": "incomplete .download it again",
    "a download of huggingface_hub in progress": "incomplete .download it again",
    "adapters alone": "volley model get ADAPTERS",
}


def loaded(folder: Path) -> models.Weights:
    """All parameters, under the names of transformers."""
    described = ModelConfig.read(folder)
    mesh = family.make_mesh((1, 1), ("fsdp", "tp"))
    model = family.build(described, leaves_of(folder, described, 0), mesh, dtype="float32")
    return {name: np.asarray(value) for name, value in params_of(model).items()}


def same(found: models.Weights, weights: models.Weights, config: dict) -> bool:
    known = models.to_tunix({name: value.astype(np.float32) for name, value in weights.items()}, config)
    return all(np.allclose(value, known[name], rtol=4e-3, atol=1e-3) for name, value in found.items())


def test_every_layout_is_compared():
    assert EXPECTED.keys() == model_folders.LAYOUTS.keys()
    assert REFUSED.keys() <= EXPECTED.keys()
    assert {EXPECTED[name] for name in EXPECTED.keys() - REFUSED.keys()} == {"new"}


@pytest.mark.parametrize("name", model_folders.LAYOUTS)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path):
    model_folders.LAYOUTS[name](tmp_path)
    if name in REFUSED:
        with pytest.raises(ConfigError) as refused:
            loaded(tmp_path)
        assert str(tmp_path) in refused.value.detail
        refused.match(REFUSED[name])
        return
    assert same(loaded(tmp_path), model_folders.NEW, json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["an unknown tensor", "more layers than config.json names", "inv_freq"])
def test_ignored_tensors_are_known(name: str, tmp_path: Path):
    model_folders.LAYOUTS[name](tmp_path)
    described = ModelConfig.read(tmp_path)
    leaves = leaves_of(tmp_path, described, 0)
    family.build(described, leaves, family.make_mesh((1, 1), ("fsdp", "tp")), dtype="float32")
    assert isinstance(leaves, FileLeaves)
    assert len(leaves.unread) == {"an unknown tensor": 1, "more layers than config.json names": 11, "inv_freq": 0}[name]


def test_random_weights_are_asked_for_by_name(tmp_path: Path):
    models.write_hf(tmp_path, model_folders.CONFIG)
    described = ModelConfig.read(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.initial_weights=random"):
        leaves_of(tmp_path, described, 0)
    assert leaves_of(tmp_path, described, 0, random=True)("final_norm.w", (16,)).shape == (16,)


@pytest.mark.parametrize("name", [name for name in model_folders.LAYOUTS if name != "an empty folder"])
def test_random_weights_never_stand_in_for_weights_that_are_there(name: str, tmp_path: Path):
    model_folders.LAYOUTS[name](tmp_path)
    with pytest.raises(ConfigError, match=r"model\.initial_weights=random, but model folder .* holds"):
        leaves_of(tmp_path, ModelConfig.parse(model_folders.CONFIG), 0, random=True)


def test_a_new_run_is_refused_before_anything_is_started(tmp_path: Path):
    def run(**model: str) -> RunConfig:
        tree = {"run": {"dir": tmp_path / "runs"}, "model": {"path": str(tmp_path / "m"), **model}}
        return RunConfig.model_validate({**tree, "data": {"env": "frozen_lake"}})

    models.write_hf(tmp_path / "m", model_folders.CONFIG)
    with pytest.raises(ConfigError, match="nothing that looks like weights"):
        check_weights(run())
    check_weights(run(initial_weights="random"))
    RunFolder(run().run.folder).record.parent.mkdir(parents=True)
    RunFolder(run().run.folder).record.write_text("{}", encoding="utf-8")
    check_weights(run())  # it goes on from its checkpoint, whose weights the trainer reads


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path):
    model_folders.single(tmp_path / "elsewhere")
    models.write_hf(tmp_path / "m", model_folders.CONFIG)
    for path in ("../elsewhere/model.safetensors", str(tmp_path / "elsewhere" / "model.safetensors")):
        model_folders.write_index(tmp_path / "m", dict.fromkeys(model_folders.NEW, path))
        with pytest.raises(ConfigError, match="is not a file of the folder"):
            weight_files(tmp_path / "m")


def test_the_largest_id_of_the_tokenizer_counts(tmp_path: Path):
    """Its ids may leave gaps: 512 tokens, of which one has the id 600."""
    settings = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 600
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.copy(TOKENIZER / "tokenizer_config.json", tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    check_vocabulary(tokenizer, ModelConfig.parse(models.tiny_config(vocab_size=601)))
    with pytest.raises(ConfigError, match="largest id is 600, the model's vocabulary has 600"):
        check_vocabulary(tokenizer, ModelConfig.parse(models.tiny_config(vocab_size=600)))
