"""Environments beside the core's: mathematics, code, SQL, games, puzzles."""
