"""Python client of runs: submit environments, claim sessions, follow a run, read its trajectories.

Importing it imports no library; each method imports what it needs.
"""

from __future__ import annotations

from volley.client.asynchronous import AsyncClient, AsyncSession
from volley.client.records import RunEvent, Trajectories
from volley.client.synchronous import Client, Session

__all__ = ["AsyncClient", "AsyncSession", "Client", "RunEvent", "Session", "Trajectories"]
