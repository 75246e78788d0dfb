"""Start a run that was stopped before its first step again with other settings: nothing made with the old ones stays.

Invariant: as long as the folder holds the old first weights, a start with other settings removes the rest again. They
are removed last, so a crash between two removals leaves a run that either continues with the old settings or is begun.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from shared.files.storage import storage
from shared.queue.server import folder_lock
from shared.run import checkpoint_files, commits
from shared.run.folder import RunFolder
from shared.schema import RunConfig


def may_be_cleared(folder: RunFolder, config: RunConfig) -> bool:
    """Return True if no step was trained, and nobody but the run's own processes holds what it has made.

    A bucket, an external Redis or a trainer elsewhere may hold weights or groups of the old settings.
    """
    services = config.services
    elsewhere = (services.redis_url, services.trainer.url, services.orchestrator.url, config.run.bucket)
    if any(elsewhere) or folder.fork.exists() or folder.bucket.exists():
        return False
    made = [*checkpoint_files.versions(folder.checkpoints), *commits.versions(folder.archive)]
    files = (folder.metrics, folder.sft, folder.refused)
    return not any(version.step for version in made) and not any(f.exists() and f.stat().st_size for f in files)


def clear(folder: RunFolder) -> None:
    """Remove the queue, evaluations, ended tickets and first weights of a run without a step.

    Submitted environments, logs, keys and the teacher's account stay. Raises ConfigError if a Redis server still uses
    the queue's folder, and StorageDenied.
    """
    with storage(folder.path):
        if folder.redis.exists():
            with folder_lock(folder.redis):
                for path in folder.redis.iterdir():
                    if path.name != "redis.lock":
                        _remove(path)
        records = (*folder.handed_over.values(), folder.recorded_beginning, folder.ledger, folder.handovers)
        others = (folder.saved, folder.demonstrations, folder.published, folder.pulled(""), folder.beginning)
        databases = [
            path for first in (folder.partials, folder.sessions) for path in folder.path.glob(f"{first.name}*")
        ]
        for path in (*records, *others, *databases, folder.summary, folder.plot, folder.archive, folder.checkpoints):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder; a folder is renamed first, so that no part of it is taken for the whole."""
    if path.is_dir() and not path.is_symlink():
        away = path.with_name(f".removed-{path.name}")
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away)
    else:
        path.unlink(missing_ok=True)
