"""Trainer and samplers for clients of Tinker's interface (the tinker SDK)."""
