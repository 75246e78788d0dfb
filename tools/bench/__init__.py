"""Benchmarks, each a program of its own that prints its results as one JSON object in its last line."""
