"""`python -m services.orchestrator --config run.yaml [key.path=value ...]`."""

from shared.process.imports import uncollected

with uncollected():
    from shared.boot import main

if __name__ == "__main__":
    main("orchestrator")
