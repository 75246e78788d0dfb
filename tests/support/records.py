"""The trainer's routes to the run's folder, without a trainer behind them."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from services.trainer.records import ROLES, RecordsState, router
from shared.run.folder import RunFolder
from shared.services_schema import Limits
from shared.web.http import create_app


def records_app(folder: Path) -> FastAPI:
    """`folder` is the run's."""
    app = create_app("trainer", limits=Limits(), tokens=None, ready=lambda: None, roles=ROLES)
    app.state.records = RecordsState(RunFolder(folder))
    app.include_router(router)
    return app
