"""Models assembled from Tunix's layers, loaded from a Hugging Face folder and sharded over a mesh."""
