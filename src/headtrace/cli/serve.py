"""``headtrace serve``: the explorer, in the browser."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from headtrace.cli import options
from headtrace.cli.output import note, say, warn
from headtrace.errors import InputError
from headtrace.lazy import require

if TYPE_CHECKING:
    from socket import socket

    from headtrace.explorer.server.app import Server

PORT = 8642


def serve(
    *,
    model: options.ModelName,
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; one that other machines can reach needs a token."
    ),
    port: int = typer.Option(PORT, min=0, max=65535, help="Port to listen on (0: any free port)."),
    token: str | None = typer.Option(
        None,
        envvar="HEADTRACE_TOKEN",
        show_envvar=True,
        help="A token that clients must send. If other machines can connect and none is given, one is made.",
    ),
    beside: str | None = typer.Option(
        None, metavar="MODEL2", help="A second model, to compare with the first."
    ),
    atlas: str | None = typer.Option(
        None, metavar="DIR", help="An atlas or interpretation folder, whose words for channels are shown."
    ),
    run: str | None = typer.Option(None, metavar="DIR", help="A run folder, for its cluster map."),
    max_tokens: int = typer.Option(512, min=1, help="Tokens that a prompt may have."),
    max_waiting: int = typer.Option(32, min=1, help="Computations that may wait in the queue."),
    open_page: bool = typer.Option(True, "--open/--no-open", help="Open it in a browser."),
    place: options.ModelOptions,
) -> None:
    """
    It runs as one process on this machine and sends nothing anywhere. Ctrl-C stops it.

    Examples:

      headtrace serve builtin
      headtrace serve smollm2-135m --port 0 --no-open
      headtrace serve EleutherAI/pythia-160m --beside ./my-checkpoint --run runs/ioi --atlas atlas/pythia
      HEADTRACE_TOKEN=... headtrace serve smollm2-135m --host 0.0.0.0
    """
    require("fastapi", "uvicorn", "sse_starlette", extra="serve", what="The explorer")
    from headtrace.explorer.panels import Settings
    from headtrace.explorer.panels.circuits import RunSource
    from headtrace.explorer.panels.why import AtlasEvidence
    from headtrace.explorer.server import app as serving

    serving.check_token(token)
    if atlas is not None and not os.path.isdir(atlas):
        raise InputError(
            f"--atlas {atlas!r}: there is no such folder. Give one of headtrace atlas or headtrace interpret."
        )
    bound = serving.bind(host, port)
    try:
        loopback = serving.is_loopback(bound)
        if not loopback and token is None:
            token = secrets.token_urlsafe(24)
        hosts = () if loopback else serving.own_names(host)
        settings = Settings(
            max_tokens=max_tokens, max_waiting=max_waiting, token=token, hosts=hosts, loopback=loopback
        )
        source = None if run is None else RunSource(run)
        models = [place.load(model)]
        if beside is not None:
            models.append(replace(place, revision=None).load(beside))
        evidence = None if atlas is None else AtlasEvidence(atlas, models[0])
        app = serving.create_app(models, settings, atlas=evidence, run=source, log=_log)
        _run(serving.Server(app), bound, serving.url(bound, token), open_page)
    finally:
        bound.close()


def _log(text: str) -> None:
    """An error of the server, line by line; nothing in it can move the cursor."""
    for line in text.splitlines():
        warn(line)


def _run(server: Server, bound: socket, address: str, open_page: bool) -> None:
    """Serve until interrupted, which ends as for any other command."""
    import asyncio
    import webbrowser

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            say(address)
            note("This is the explorer's address. Ctrl-C stops it.")
            if open_page:
                await asyncio.to_thread(webbrowser.open, address)
        await serving

    asyncio.run(serve())
