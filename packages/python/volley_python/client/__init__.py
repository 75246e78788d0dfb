"""Python client of runs: submit environments, claim sessions, follow a run, read its trajectories.

Importing it imports no library; each method imports what it needs.
"""

from __future__ import annotations

from volley_python.client.asynchronous import AsyncClient, AsyncSession
from volley_python.client.records import RunEvent, Trajectories
from volley_python.client.synchronous import Client, Session

__all__ = ["AsyncClient", "AsyncSession", "Client", "RunEvent", "Session", "Trajectories"]
