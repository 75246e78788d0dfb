"""Workers that play agents of other projects in Volley's sessions: see docs/bridges.md."""
