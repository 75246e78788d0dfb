"""The `volley` command: the local supervisor, reports, benchmarks. It starts the services as processes and imports none
of them.
"""
