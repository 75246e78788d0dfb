"""Spot checks: episodes scored again by the trainer, to name rollout servers that compute something else."""
