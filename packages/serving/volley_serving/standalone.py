"""`python -m volley_serving.standalone --config serve.yaml`: serve a model without a run, for `volley serve`."""

from shared.process.imports import uncollected

with uncollected():
    from shared.boot import main

if __name__ == "__main__":
    main("rollout", requires="sgl_jax", entry="volley_serving.server:open_standalone")
