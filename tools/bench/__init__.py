"""Benchmarks. Each is a program that prints its results as one JSON object in its last line."""
