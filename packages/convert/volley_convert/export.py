"""Export of a run's version as a Hugging Face folder.

`python -m volley_convert.export RUN_DIR FOLDER --version V` prints what it wrote, or an error as a
problem body. It only reads the run's folder.

The tensors are the published parameters bit for bit, in the run's `model.dtype`, as the rollout servers load them.
Adapters are merged into their base in float32, because in bfloat16 the sum would lose most of a small change.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import read_base
from services.trainer.interfaces import RunChecks
from services.trainer.models.arrays import HostArray
from services.trainer.models.initial_weights import safetensors_leaves
from shared import packages
from shared.errors import ConfigError, VolleyError, WeightsError, problem
from shared.files.storage import storage
from shared.models import adapter, hub, origin
from shared.models.config import CONFIG, GENERATION_CONFIG, ModelConfig
from shared.models.names import to_files
from shared.models.weight_files import WEIGHTS, weight_files
from shared.run import state as states
from shared.run import trust
from shared.run.checkpoint_files import Manifest
from shared.run.folder import RunFolder
from volley_convert import exported_files

_ROUNDS = (
    "the weights with merged adapters are float32, because bfloat16 rounds away most of a small change: load the folder"
    " in float32; --adapter exports the adapters unmerged"
)
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Export and return the exit code: 0 written, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m volley_convert.export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=origin.LATEST)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--trust", action="store_true")
    arguments = parser.parse_args(argv)
    os.environ |= _QUIET
    if arguments.trust:
        trust.accept(RunFolder(arguments.run_dir))
    try:
        summary = export(arguments.run_dir, arguments.folder, arguments.version, adapter_only=arguments.adapter)
        _print_line({"ok": True, **summary})
    except VolleyError as error:
        _print_line(problem(error))
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def export(run_dir: Path, folder: Path, version: str, *, adapter_only: bool = False) -> dict[str, Any]:
    """Write `folder` atomically; return a summary, with a `warning` if transformers reads it differently than Volley,
    and a `note` if it holds merged weights that are wider than the rest.

    Writes full weights, or, with `adapter_only`, the adapters as PEFT saves them.

    Raises ConfigError (no run, no such version, no adapters, the folder exists), WeightsError (the checkpoint is
    damaged), StorageFull.
    """
    RunFolder(run_dir).check()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", "name another folder, or remove it")
    found = origin.find(f"{run_dir}@{version}", None)
    if found is None:
        raise ConfigError(f"{run_dir}@{version} is a folder, so it cannot name a version of a run", "rename the folder")
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
    dtypes = sorted({value.dtype.name for value in tensors.values()})
    note = _ROUNDS if manifest.adapter is not None and len(dtypes) > 1 else None
    summary = {"version": manifest.version, "tensors": len(tensors), "dtype": ", ".join(dtypes)}
    return summary | {key: text for key, text in (("warning", warning), ("note", note)) if text is not None}


def _hugging_face(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert parameters to the tensors of Hugging Face's files, with experts one by one."""
    return {name: tensor for leaf, value in params.items() for name, tensor in to_files(leaf, value).items()}


def _write_adapter(
    draft: Path, folder: Path, root: Path, manifest: Manifest, model: Path, tensors: Mapping[str, np.ndarray]
) -> str | None:
    """Write the adapters, and their base too if the model's folder holds other weights.

    It does after a warm start, or if the run began from another run's version or random weights. PEFT would silently
    apply the adapters to the wrong weights.
    """
    assert manifest.adapter is not None
    base, warning = _whole(read_base(root, manifest.adapter, OrbaxArrays())), None
    named = model
    if not _holds(model, base):
        named = folder.absolute() / "base"
        (draft / "base").mkdir()
        warning = _write_model(draft / "base", manifest.model, model, _hugging_face(base))
    described = ModelConfig.parse(manifest.model)
    config = peft_config(described, manifest.adapter.rank, manifest.adapter.alpha, str(named), tensors)
    exported_files.write_json(draft / "adapter_config.json", config)
    save_file(dict(tensors), draft / "adapter_model.safetensors", metadata={"format": "pt"})
    return warning


def _holds(model: Path, params: Mapping[str, np.ndarray]) -> bool:
    """Compare the folder's weights with these, bit for bit in their dtype."""
    try:
        leaves = safetensors_leaves(model, weight_files(model))
        return all(
            np.array_equal(np.asarray(leaves(leaf, value.shape)).astype(value.dtype), value)
            for leaf, value in params.items()
        )
    except ConfigError:
        return False


def _verified(checkpoint: Path, *, merge: bool) -> tuple[Manifest, Mapping[str, np.ndarray]]:
    """Verify a checkpoint; return manifest and parameters, adapters merged into their base if `merge`.

    Raises WeightsError, also if the run's trainer removes the checkpoint meanwhile.
    """
    try:
        manifest, _ = states.verify(checkpoint)
        checks: RunChecks | None = packages.part("run_checks", required=False)
        if checks is not None:
            checks.check_log(checkpoint)
        params = _whole(OrbaxArrays().read(checkpoint / manifest.path))
        if (found := manifest.adapter) is None or not merge:
            return manifest, params
        base = _whole(read_base(checkpoint.parent, found, OrbaxArrays()))
        return manifest, adapter.merged_arrays(base, params, found.scale)
    except ValueError as error:
        raise WeightsError(f"the adapters of {checkpoint} do not fit their base: {error}") from error
    except OSError as error:
        raise WeightsError(
            f"{checkpoint} cannot be read: {error}", "try again: the run's trainer may have removed the checkpoint"
        ) from error


def _whole(arrays: Mapping[str, HostArray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in arrays.items()}


def _write_model(
    draft: Path, described: Mapping[str, Any], model: Path, tensors: Mapping[str, np.ndarray]
) -> str | None:
    """Write weights, tokenizer, generation_config.json and config.json.

    config.json is the run's description of its model, with the widest dtype of the tensors, in which transformers loads
    all, and the special tokens. Returns how transformers reads the folder differently than Volley, or None.
    """
    save_file(dict(tensors), draft / WEIGHTS, metadata={"format": "pt"})
    has_tokenizer = exported_files.copy_tokenizer(model, draft)
    try:
        given = orjson.loads((model / CONFIG).read_bytes())
        tokens = exported_files.token_ids(draft, ModelConfig.parse(described).eos_token_ids, given)
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"the model's {model / CONFIG} cannot be read: {error}") from error
    dtype = np.result_type(*(value.dtype for value in tensors.values())).name
    exported_files.write_json(draft / CONFIG, {**described, **tokens, "torch_dtype": dtype})
    exported_files.write_json(draft / GENERATION_CONFIG, tokens)
    return exported_files.difference(draft) if has_tokenizer else None


def peft_config(
    model: ModelConfig, rank: int, alpha: float, base: str, tensors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Make the content of adapter_config.json for adapters of the base model `base`, with PEFT's names.

    In a model with experts, PEFT takes the projections of a dense layer's feed-forward part for those of the experts,
    which transformers 5 keeps in one array. There they are named as parameters, by their place in a layer.
    """
    places = {re.sub(r"^base_model\.model\.model\.layers\.\d+\.", "", name.rsplit(".", 2)[0]) for name in tensors}
    parameters = {place for place in places if model.experts is not None and place.startswith("mlp.")}
    targets = {"target_modules": sorted({place.rpartition(".")[2] for place in places - parameters})}
    if parameters:
        targets["target_parameters"] = sorted(f"{place}.weight" for place in parameters)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        **targets,
        "inference_mode": True,
    }


def _print_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
