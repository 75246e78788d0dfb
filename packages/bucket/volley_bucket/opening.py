"""Open the run's store, which trainer and rollout server use if `run.bucket` is set."""

from __future__ import annotations

from functools import partial

from services.trainer.loop.run_store import StoreContext
from services.trainer.resuming import check_settings
from shared.models.config import ModelConfig
from shared.run import archive
from shared.run.folder import RunFolder
from volley_bucket.objects import Bucket
from volley_bucket.run.restore import FolderRestore
from volley_bucket.run.run_bucket import RunBucket
from volley_bucket.run.writer import BucketWriter

_CHECKPOINT_BYTES_A_NUMBER, _BESIDE_BYTES = 40, 64 * 2**20
"""Upper bound; float32 weights of policy and critic, two moments each, and the published weights take 36 bytes."""


def open_run(context: StoreContext) -> RunBucket:
    """Return the store of the run's folder."""
    config, status, run_id = context.config, context.status, context.run_id
    bucket, folder, run = Bucket(context.address), RunFolder(context.run_folder), config.run.name
    most = _CHECKPOINT_BYTES_A_NUMBER * ModelConfig.read(context.model_folder).n_numbers + _BESIDE_BYTES
    of_step = archive.MAX_GROUP_BYTES * config.trainer.groups_per_step
    check = partial(check_settings, settings=context.settings)
    restore = FolderRestore(bucket, folder, run, run_id, most, of_step, check)
    writer = BucketWriter(bucket, folder, run, run_id)
    return RunBucket(restore, writer, folder, status, config.services.limits.grace_s / 2)
