"""JAX over several processes: their devices become those of one mesh."""

from __future__ import annotations

import os

import jax

_WAIT_S, _LEAVE_S = 120, 5
_SILENT_S = 100
"""Processes that are gone are noticed by the trainer's own connections, sooner."""


def join_devices(coordinator: str, n_processes: int, process_id: int, n_devices: int) -> None:
    """Before anything is computed. On CPUs each process gets its part of `n_devices`, unless XLA_FLAGS says how many it
    has; others have what is there.
    """
    if (jax.config.jax_platforms or "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", max(1, n_devices // n_processes))
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
    jax.distributed.initialize(
        coordinator,
        n_processes,
        process_id,
        initialization_timeout=_WAIT_S,
        heartbeat_timeout_seconds=_SILENT_S,
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=_LEAVE_S,
    )


def leave_devices() -> None:
    """Of all processes together, when there is nothing more to compute: else the first one that ends takes the others
    with it. Nothing, if they were never joined.
    """
    jax.distributed.shutdown()
