"""Runs on several hosts: Slurm, SkyPilot, TPU VMs."""
