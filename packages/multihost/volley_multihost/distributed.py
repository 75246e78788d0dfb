"""JAX over several processes, whose devices form one mesh."""

from __future__ import annotations

import os

import jax

_WAIT_S, _LEAVE_S = 120, 5
_SILENT_S = 100
"""JAX's heartbeat timeout; the trainer's own connections notice a lost process sooner."""


def join_devices(coordinator: str, n_processes: int, process_id: int, n_devices: int) -> None:
    """Join the processes' devices, before any computation.

    On CPUs each process gets its share of `n_devices`, unless XLA_FLAGS sets the number; otherwise it has its devices.
    """
    if (jax.config.jax_platforms or "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", max(1, n_devices // n_processes))
    jax.config.update("jax_enable_preemption_service", False)  # the service handles SIGTERM itself
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
    """Leave JAX's cluster; all processes together, after the last computation.

    Without this the first process that ends would end the others. Does nothing if they never joined.
    """
    jax.distributed.shutdown()
