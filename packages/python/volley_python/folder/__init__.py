"""Readers of a run's folder, which views and proofs share."""
