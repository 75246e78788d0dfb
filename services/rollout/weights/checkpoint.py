"""Check of a checkpoint's manifest, before the engine loads the weights.

Only manifests are read; the engine verifies the bytes of the weights as it loads them. Everything blocks on disk.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from services.rollout.engines.staged import StagedBase, StagedWeights
from shared.errors import ConfigError, WeightsError
from shared.files.reading import confined
from shared.models.config import ModelConfig
from shared.models.weight_files import INDEX, UNMERGED, WEIGHTS, weight_files
from shared.published.manifest import PublishedManifest, WeightTree
from shared.run import checkpoint_files, saved
from shared.run.checkpoint_files import Manifest, ManifestFile
from shared.types import WeightVersion

_NUMBER_BYTES, _BESIDE_BYTES = 4, 2**26  # adapters of a small model may be larger than it is


def examine(path: Path, model: ModelConfig, run: str, name: str | None = None) -> StagedWeights:
    """Read what to stage from a checkpoint of this run and model (`path` is its folder or manifest), or from a Hugging
    Face folder, whose weights are called `name` (default: as the folder).

    `digest` covers names and digests of the manifest's files and the digest of an adapter's base; for a Hugging Face
    folder, names, sizes and times of its files.

    Raises WeightsError or Forbidden.
    """
    folder = path.parent if path.name == checkpoint_files.MANIFEST else path
    try:
        if not (folder / checkpoint_files.MANIFEST).is_file():
            return _hugging_face(folder, name or folder.name)
    except OSError as error:
        raise WeightsError(f"{str(folder)[:200]} cannot be read: {error.strerror}") from error
    manifest = checkpoint_files.read_manifest(folder)
    if name not in (None, manifest.version):
        raise WeightsError(f"{manifest.version} is a checkpoint of the trainer and cannot be renamed to {name}")
    saved.check(folder)
    _belongs(manifest, folder, run)
    _same_model(manifest, model)
    ids, logprobs, noise = _probe(manifest, model.vocab_size)
    confined(folder, manifest.path)
    base = _base(manifest, folder)
    return StagedWeights(
        str(folder),
        manifest.version,
        hashlib.sha256(
            "".join([*(f.name + f.blake3 for f in manifest.files), base.digest if base else ""]).encode()
        ).hexdigest(),
        below=manifest.path,
        files=manifest.files,
        tree=manifest.tree,
        probe_ids=ids,
        probe_logprobs=logprobs,
        probe_noise=noise,
        base=base,
    )


def examine_published(manifest: PublishedManifest, folder: Path, model: ModelConfig, run: str) -> StagedWeights:
    """Read what to stage from a published version of this run and model, whose chunks are pulled into `folder`.

    Raises WeightsError.
    """
    _same_run(manifest.version, manifest.run, run)
    _same_model(manifest, model)
    _bounded(manifest, model)
    ids, logprobs, noise = _probe(manifest, model.vocab_size)
    adapter, base = manifest.adapter, None
    if adapter is not None:
        base = StagedBase(str(folder), adapter.base.digest, _files(adapter.base), adapter.base.leaves, adapter.scale)
    return StagedWeights(
        str(folder),
        manifest.version,
        manifest.digest,
        kind="chunks",
        files=_files(manifest.weights),
        tree=manifest.weights.leaves,
        probe_ids=ids,
        probe_logprobs=logprobs,
        probe_noise=noise,
        base=base,
    )


def _bounded(manifest: PublishedManifest, model: ModelConfig) -> None:
    """Refuse a version that is larger than the model can be, a float32 for each number. Raises WeightsError."""
    for tree in manifest.trees:
        check_bytes(manifest.version, tree.n_bytes, model)


def check_bytes(what: str, n_bytes: int, model: ModelConfig) -> None:
    """Raises WeightsError for more than a float32 for each number of the model."""
    if n_bytes > (most := _NUMBER_BYTES * model.n_numbers + _BESIDE_BYTES):
        raise WeightsError(f"{what} has {n_bytes} bytes, but this server's model has at most {most}")


def _files(tree: WeightTree) -> tuple[ManifestFile, ...]:
    return tuple(ManifestFile(chunk.blake3, chunk.size, chunk.blake3) for chunk in tree.chunks)


def _base(manifest: Manifest, folder: Path) -> StagedBase | None:
    if (adapter := manifest.adapter) is None:
        return None
    where = confined(folder.parent, adapter.base.folder(folder.parent))
    if not where.is_dir():
        raise WeightsError(
            f"{manifest.version} needs the base {adapter.base.digest}, which is missing in {where.parent}"
        )
    return StagedBase(str(where), adapter.base.digest, adapter.base.files, adapter.base.tree, adapter.scale)


def _belongs(manifest: Manifest, folder: Path, run: str) -> None:
    _same_run(manifest.version, manifest.run, run)
    if manifest.version != folder.name:
        raise WeightsError(
            f"folder {folder.name} holds the manifest of {manifest.version}",
            "a checkpoint's folder has its version's name",
        )
    if manifest.kind != ("adapter" if manifest.adapter else "full"):
        raise WeightsError(
            f"{manifest.version} has kind {manifest.kind!r}; this server loads full weights and adapters with a base"
        )


def _same_run(version: str, run: str, ours: str) -> None:
    if run != ours:
        raise WeightsError(
            f"{version} belongs to run {run!r}, but this server serves run {ours!r}", "is run.name the trainer's?"
        )


def _same_model(manifest: Manifest | PublishedManifest, model: ModelConfig) -> None:
    try:
        theirs = ModelConfig.parse(manifest.model, f"the manifest of {manifest.version}")
    except ConfigError as error:
        raise WeightsError(f"{manifest.version} has an unsupported model: {error}") from error
    if key := model.difference(theirs):
        says, ours = getattr(theirs, key), getattr(model, key)
        raise WeightsError(
            f"{manifest.version} has another model than this server: {key} is {says} instead of {ours}",
            "is model.path the trainer's?",
        )


def _probe(
    manifest: Manifest | PublishedManifest, vocab_size: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Ids, log-probabilities and noise of the probe. Raises WeightsError for a token outside the vocabulary."""
    probe = manifest.probe
    if probe is None:
        return None, None, None
    ids, logprobs = np.array(probe.input_ids, np.int32), np.array(probe.logprobs, np.float32)
    if ids.max() >= vocab_size:
        raise WeightsError(
            f"{manifest.version}: the probe has token {ids.max()}, but the vocabulary has only {vocab_size} tokens"
        )
    return ids, logprobs, None if probe.noise is None else np.asarray(probe.noise, np.float32)


def _hugging_face(folder: Path, name: str) -> StagedWeights:
    if WeightVersion.of_name(name) is not None:
        raise WeightsError(
            f"{folder} holds no {checkpoint_files.MANIFEST}, but {name} is a version name reserved for the trainer"
        )
    for file_name in (WEIGHTS, INDEX, UNMERGED):
        confined(folder, file_name)
    try:
        files = [*weight_files(folder), *folder.glob(UNMERGED)]
    except ConfigError as error:
        raise WeightsError(error.detail, error.hint) from error
    for file in files:
        confined(folder, file.relative_to(folder))
    stamp = "".join(f"{f.name}{f.stat().st_size}{f.stat().st_mtime_ns}" for f in files)
    return StagedWeights(str(folder), name, hashlib.sha256(stamp.encode()).hexdigest(), kind="hf")
