"""Clear a run that was stopped before its first step, so that it can start with other settings.

Invariant: as long as the folder holds the old first weights, a start with other settings removes the rest again. They
are removed last, so a crash between two removals leaves a run that continues with the old settings or starts again.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shared.config import recorded
from shared.errors import ConfigError
from shared.files.storage import storage
from shared.queue.server import folder_lock
from shared.run import checkpoint_files, commits
from shared.run.checkpoint_files import BAD
from shared.run.folder import RunFolder
from shared.schema import RunConfig

_STEP = re.compile(r"s(\d{6,})\b")
"""Step in the names of archived groups, such as `s000001.zst`."""


def may_be_cleared(folder: RunFolder, config: RunConfig) -> bool:
    """Return True if no step was trained, and only the run's own processes hold its data.

    A bucket, or a Redis, trainer or rollout server elsewhere may hold weights or groups of the old settings, which the
    folder's configuration shows. A folder that is a link or a mount is not removed.
    """
    try:
        before = recorded(folder.config).config
    except ConfigError:
        return False
    if any(map(_is_elsewhere, (config, before))) or folder.fork.exists() or folder.bucket.exists():
        return False
    if any(path.is_symlink() or path.is_mount() for path in (folder.redis, folder.archive, folder.checkpoints)):
        return False
    made = [*checkpoint_files.versions(folder.checkpoints), *commits.versions(folder.archive)]
    archived = (found for path in folder.archive.rglob("s*") if (found := _STEP.match(path.name)))
    if any(version.step for version in made) or any(int(found[1]) for found in archived):
        return False
    evidence = (folder.metrics, folder.sft, folder.refused, folder.refused_groups, folder.checkpoints / BAD)
    return not any(path.exists() and path.stat().st_size for path in evidence)


def _is_elsewhere(config: RunConfig) -> bool:
    """Return True if a service of the run that keeps its weights or groups may be another host's."""
    services = config.services
    urls = (services.redis_url, services.trainer.url, services.orchestrator.url, *services.rollout_urls)
    return any(urls) or bool(config.run.bucket)


def clear(folder: RunFolder) -> None:
    """Remove the queue, evaluations, ended tickets, first weights and copied model of a run without a step.

    Submitted environments, logs, keys and the teacher's account stay. Raises ConfigError if a Redis server still uses
    the queue's folder, and StorageDenied.
    """
    with storage(folder.path):
        if folder.redis.exists():
            with folder_lock(folder.redis):
                for path in folder.redis.iterdir():
                    if path.name != "redis.lock":
                        _remove(path)
        records = (*folder.handed_over.values(), folder.recorded_run_id, folder.ledger, folder.handovers)
        others = (folder.saved, folder.demonstrations, folder.published, folder.pulled(""), folder.run_id)
        databases = [
            path for first in (folder.partials, folder.sessions) for path in folder.path.glob(f"{first.name}*")
        ]
        shown = (folder.summary, folder.plot, folder.model)
        for path in (*records, *others, *shown, *databases, folder.archive, folder.checkpoints):
            _remove(path)


def sweep(folder: RunFolder) -> None:
    """Remove what a run without weights need not keep: digests of its data, and what a crash left half removed."""
    with storage(folder.path):
        _remove(folder.environment_data)
        for away in folder.path.glob(".removed-*"):
            shutil.rmtree(away)


def _remove(path: Path) -> None:
    """Remove a file or a folder; a folder is renamed first, so that no part of it is taken for the whole."""
    if path.is_dir() and not path.is_symlink():
        away = path.with_name(f".removed-{path.name}")
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away)
    else:
        path.unlink(missing_ok=True)
