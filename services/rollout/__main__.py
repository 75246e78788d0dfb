"""`python -m services.rollout --config run.yaml [key.path=value ...]`."""

from shared.process.imports import uncollected

with uncollected():
    from shared.boot import main

if __name__ == "__main__":
    main("rollout", requires="sgl_jax")
