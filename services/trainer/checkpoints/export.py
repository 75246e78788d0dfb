"""A version of a run as a Hugging Face folder: `python -m services.trainer.checkpoints.export RUN_DIR FOLDER --version
V`, which prints what it wrote, or an error as a problem body. It reads the run's folder, and changes nothing in it.

The tensors are the published parameters bit by bit, in the run's `model.dtype`: what the rollout servers compute with.
Adapters are merged into their base.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from services.trainer.checkpoints import exported_files
from services.trainer.checkpoints.logged import check_log
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import read_base
from services.trainer.models.arrays import HostArray
from services.trainer.models.initial_weights import safetensors_leaves
from shared.errors import ConfigError, VolleyError, WeightsError, problem
from shared.files.storage import storage
from shared.models import adapter, hub, origin
from shared.models.config import CONFIG, GENERATION_CONFIG, ModelConfig
from shared.models.names import hf_name, in_files, is_experts, to_hf
from shared.models.weight_files import WEIGHTS, weight_files
from shared.run import state as states
from shared.run.checkpoint_files import Adapter, Manifest
from shared.run.folder import RunFolder

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.checkpoints.export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=origin.LATEST)
    parser.add_argument("--adapter", action="store_true")
    arguments = parser.parse_args(argv)
    os.environ |= _QUIET
    try:
        told = export(arguments.run_dir, arguments.folder, arguments.version, adapter_only=arguments.adapter)
        _tell({"ok": True, **told})
    except VolleyError as error:
        _tell(problem(error))
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def export(run_dir: Path, folder: Path, version: str, *, adapter_only: bool = False) -> dict[str, Any]:
    """Writes `folder`, whole or not at all, and tells what is in it, with a `warning` if transformers reads it
    otherwise than Volley. With `adapter_only` these are a run's adapters as PEFT saves them, else full weights.

    Raises ConfigError (no run, no such version, no adapters, the folder is taken), WeightsError (the checkpoint is not
    whole), StorageFull.
    """
    if not RunFolder(run_dir).config.exists():
        raise ConfigError(f"{run_dir} is not the folder of a run", "it holds no config.yaml")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", "name another folder, or remove it")
    found = origin.find(f"{run_dir}@{version}", None)
    if found is None:
        raise ConfigError(f"{run_dir}@{version} is a folder, so no version of a run can be meant", "rename it")
    model = hub.model_of(found)
    manifest, params = _verified(found.checkpoint, merge=not adapter_only)
    if adapter_only and manifest.adapter is None:
        raise ConfigError(f"{run_dir} trains no adapters", "leave --adapter out for the full weights")
    tensors = dict(adapter.peft(*item) for item in params.items()) if adapter_only else _hugging_face(params)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with storage(folder.parent), tempfile.TemporaryDirectory(prefix=".volley-export-", dir=folder.parent) as temporary:
        draft = Path(temporary) / "model"
        draft.mkdir()
        if adapter_only:
            warning = _write_adapter(draft, folder, found.checkpoint.parent, manifest, model, tensors)
        else:
            warning = _write_model(draft, manifest.model, model, tensors)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    told = {"version": manifest.version, "tensors": len(tensors), "dtype": ", ".join(_dtypes(tensors))}
    return told if warning is None else {**told, "warning": warning}


def _dtypes(tensors: Mapping[str, np.ndarray]) -> list[str]:
    return sorted({value.dtype.name for value in tensors.values()})


def _hugging_face(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As Hugging Face's files have them: experts one by one."""
    tensors: dict[str, np.ndarray] = {}
    for leaf, value in params.items():
        name, array = hf_name(leaf), np.ascontiguousarray(to_hf(leaf, value))
        one_by_one = zip(in_files(name, len(array)), array, strict=True) if is_experts(leaf) else [(name, array)]
        tensors |= dict(one_by_one)
    return tensors


def _write_adapter(
    draft: Path, folder: Path, root: Path, manifest: Manifest, model: Path, tensors: Mapping[str, np.ndarray]
) -> str | None:
    """Write the adapters, and their base beside them where the model's folder holds other weights: after a warm start,
    from another run's version, or from random ones. PEFT would apply the adapters to those without a word.
    """
    assert manifest.adapter is not None
    base, warning = _whole(read_base(root, manifest.adapter, OrbaxArrays())), None
    named = model
    if not _holds(model, base):
        named = folder.absolute() / "base"
        (draft / "base").mkdir()
        warning = _write_model(draft / "base", manifest.model, model, _hugging_face(base))
    exported_files.write_json(draft / "adapter_config.json", _peft_config(manifest.adapter, named, tensors))
    save_file(dict(tensors), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    return warning


def _holds(model: Path, params: Mapping[str, np.ndarray]) -> bool:
    """Compare the folder's weights with these, bit by bit in their dtype."""
    try:
        leaves = safetensors_leaves(model, weight_files(model))
        return all(
            np.array_equal(np.asarray(leaves(leaf, value.shape)).astype(value.dtype), value)
            for leaf, value in params.items()
        )
    except ConfigError:
        return False


def _verified(checkpoint: Path, *, merge: bool) -> tuple[Manifest, Mapping[str, np.ndarray]]:
    """What the checkpoint holds; adapters merged into their base, if `merge`.

    Raises WeightsError, also if the run's trainer removes the checkpoint meanwhile.
    """
    try:
        manifest, _ = states.verify(checkpoint)
        check_log(checkpoint, OrbaxArrays())
        params = _whole(OrbaxArrays().read(checkpoint / manifest.path))
        if (found := manifest.adapter) is None or not merge:
            return manifest, params
        base = _whole(read_base(checkpoint.parent, found, OrbaxArrays()))
        return manifest, adapter.merged_arrays(base, params, found.scale)
    except ValueError as error:
        raise WeightsError(f"the adapters of {checkpoint} do not fit their base: {error}") from error
    except OSError as error:
        raise WeightsError(
            f"{checkpoint} cannot be read: {error}", "if the run goes on, its trainer may just have removed it"
        ) from error


def _whole(arrays: Mapping[str, HostArray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in arrays.items()}


def _write_model(
    draft: Path, described: Mapping[str, Any], model: Path, tensors: Mapping[str, np.ndarray]
) -> str | None:
    """Write weights, tokenizer, generation_config.json and config.json: the run's description of its model, with the
    dtype of its tensors and the special tokens. Returns how transformers reads it otherwise than Volley, if it does.
    """
    save_file(dict(tensors), draft / WEIGHTS, metadata={"format": "pt"})
    has_tokenizer = exported_files.copy_tokenizer(model, draft)
    try:
        given = orjson.loads((model / CONFIG).read_bytes())
        tokens = exported_files.token_ids(draft, ModelConfig.parse(described).eos_token_ids, given)
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"the model's {model / CONFIG} cannot be read any more: {error}") from error
    exported_files.write_json(draft / CONFIG, {**described, **tokens, "torch_dtype": _dtypes(tensors)[0]})
    exported_files.write_json(draft / GENERATION_CONFIG, tokens)
    return exported_files.difference(draft) if has_tokenizer else None


def _peft_config(found: Adapter, base: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": found.rank,
        "lora_alpha": found.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rsplit(".", 3)[1] for name in tensors}),
        "inference_mode": True,
    }


def _tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
