"""Models of Tunix, one module a family, built from a Hugging Face folder and sharded over a mesh."""
