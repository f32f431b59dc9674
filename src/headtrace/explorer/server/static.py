"""The explorer's own files: a list made at start. What is not on it is not there, whatever a path says."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import Response

from headtrace.explorer.server.answers import RefusedError, errors

if TYPE_CHECKING:
    from importlib.abc import Traversable

FOLDERS = ("app", "page")
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
LEFT_OUT = ("template.html",)
"""Of the page: a template that is filled, not shown."""


def listed() -> dict[str, tuple[Traversable, str]]:
    """By the path in the address: a file of the package and its type."""
    found: dict[str, tuple[Traversable, str]] = {}
    for folder in FOLDERS:
        place = files("headtrace.explorer") / folder
        for item in place.iterdir() if place.is_dir() else ():
            kind = TYPES.get("." + item.name.rpartition(".")[2])
            if kind is not None and item.is_file() and item.name not in LEFT_OUT:
                found[f"{folder}/{item.name}"] = item, kind
    return found


def static_routes(known: Mapping[str, tuple[Traversable, str]]) -> APIRouter:
    """Routes of the start page and its modules. They are no part of the API."""
    router = APIRouter(include_in_schema=False)

    def sent(name: str) -> Response:
        if name not in known:
            raise RefusedError(404, "not_found", "There is nothing at this address.")
        item, kind = known[name]
        headers = {"Cache-Control": "no-cache"}
        return Response(item.read_bytes(), media_type=kind, headers=headers)

    @router.get("/")
    async def index() -> Response:
        return sent("app/index.html")

    @router.get("/static/{name:path}", responses=errors(404))
    async def module(name: str) -> Response:
        return sent(name)

    return router
