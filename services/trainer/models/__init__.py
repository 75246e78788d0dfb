"""Qwen3 of Tunix, built from a Hugging Face folder and sharded over a mesh."""
