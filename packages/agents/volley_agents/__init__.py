"""Agents: programs that call the model through a recorder, which makes episodes of their calls."""
