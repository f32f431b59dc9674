"""The explorer's server as an ASGI application.

app = create_app([headtrace.load("builtin")])
uvicorn.run(app)                              # or, with all that belongs to it: headtrace serve builtin
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import headtrace
from headtrace.errors import HeadtraceError
from headtrace.explorer.server.answers import handle
from headtrace.explorer.server.events import Listeners
from headtrace.explorer.server.jobs import Compute
from headtrace.explorer.server.routes import router
from headtrace.explorer.server.security import guarded
from headtrace.explorer.server.service import Explorer
from headtrace.explorer.server.settings import Settings
from headtrace.explorer.server.static import listed, static_routes

if TYPE_CHECKING:
    from headtrace.explorer.views.runs import RunSource
    from headtrace.explorer.views.why import Known
    from headtrace.models import Model


_LOGGER = logging.getLogger("headtrace")


def create_app(
    models: Model | Sequence[Model],
    settings: Settings | None = None,
    *,
    atlas: Known | None = None,
    run: RunSource | None = None,
    log: Callable[[str], None] = _LOGGER.error,
) -> FastAPI:
    """An application that serves one model, or two beside each other; ``log`` is told of the server's own mistakes."""
    limits = Settings() if settings is None else settings
    several = list(models) if isinstance(models, Sequence) else [models]
    compute = Compute(limits.max_waiting, limits.kept_jobs, log)
    app = FastAPI(
        title="headtrace explorer",
        version=headtrace.__version__,
        summary="Why does this attention head attend here? The API behind `headtrace serve`.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(compute),
        middleware=[Middleware(guarded, settings=limits, log=log)],
    )
    app.state.explorer = Explorer(several, limits, atlas=atlas, run=run)
    app.state.compute, app.state.listeners = compute, Listeners(limits.max_listeners)
    for kind in (HeadtraceError, RequestValidationError, HTTPException, MemoryError):
        app.add_exception_handler(kind, handle)
    app.include_router(router)
    app.include_router(static_routes(listed()))
    return app


def _lifespan(compute: Compute) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncGenerator[None]:
        compute.start()
        try:
            yield
        finally:
            compute.stop()

    return running
