"""Proofs of runs from their folders: every ticket once, every step again, every reward again."""
