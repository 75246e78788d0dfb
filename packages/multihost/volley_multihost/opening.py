"""Backends of the processes of one trainer."""

from __future__ import annotations

from dataclasses import replace

from services.trainer.backend.inputs import BackendInputs, OpenedBackend
from services.trainer.backend.warm_start import warm_starts
from services.trainer.rl_backend import make_backend, opened
from shared.models import origin
from shared.models.chat import tokenizer_of_run
from shared.models.content import with_content
from shared.models.hub import kept_in, model_folder
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from volley_multihost.backend import FollowingCalls, LeadingBackend
from volley_multihost.checkpoints import FollowingCheckpoints, LeadingCheckpoints
from volley_multihost.options import GroupOptions
from volley_multihost.processes import Follower, Leader
from volley_multihost.publications import FollowingPublications, LeadingPublications


def open_leading(options: GroupOptions, given: BackendInputs) -> OpenedBackend:
    """Open the backend of process 0. Raises ConfigError."""
    settings, leader = given.settings, Leader(options)
    folder = RunFolder(settings.run_folder).checkpoints
    checkpoints = LeadingCheckpoints(folder, settings.run, settings.max_to_keep, leader)
    publications = LeadingPublications(given.publications, leader)
    made = make_backend(given.config, given.folder, given.tokenizer, given.origin, checkpoints, publications)
    leading = LeadingBackend(made.backend, leader)
    return replace(opened(given, made, leading, checkpoints), close=leading.close)


def open_following(config: RunConfig, follower: Follower) -> FollowingCalls:
    """Open the backend of a follower. Raises ConfigError."""
    run = RunFolder(config.run.folder.absolute())
    found = origin.find(config.model.path, kept_in(run.path))
    if found is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": found.path})})
    folder = model_folder(config.model.path, run.path, weights=True)
    config = with_content(config, folder)
    checkpoints = FollowingCheckpoints(run.checkpoints, follower)
    publications = FollowingPublications(follower)
    made = make_backend(config, folder, tokenizer_of_run(folder, config.run.date), found, checkpoints, publications)
    return FollowingCalls(made.backend, lambda examples: warm_starts().received(config, made.tokens, examples))
