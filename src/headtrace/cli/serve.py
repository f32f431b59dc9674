"""``headtrace serve``: the explorer, in the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.errors import InputError
from headtrace.extras import require

if TYPE_CHECKING:
    from socket import socket

    from fastapi import FastAPI

    from headtrace.explorer.panels import Settings
    from headtrace.explorer.server.app import Server

PORT = 8642


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    model: options.ModelName,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")
    ] = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="HEADTRACE_TOKEN",
            show_envvar=True,
            help="What clients must know; beyond this machine one is made if none is given.",
        ),
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="MODEL2", help="A second model to put beside the first.")
    ] = None,
    atlas: Annotated[
        str | None, typer.Option(metavar="DIR", help="An atlas or interpretation folder: words for channels.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="DIR", help="A run folder, for its cluster map.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a prompt may have.")] = 512,
    max_waiting: Annotated[int, typer.Option(min=1, help="Computations that may wait in the queue.")] = 32,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Explore a model in the browser: type a prompt, click an attention weight, see why.

    One process on this machine; nothing is sent anywhere. Ctrl-C stops it.

    Examples:

      headtrace serve builtin

      headtrace serve smollm2-135m --port 0 --no-open

      headtrace serve EleutherAI/pythia-160m --beside ./my-checkpoint --run runs/ioi --atlas atlas/pythia

      HEADTRACE_TOKEN=... headtrace serve smollm2-135m --host 0.0.0.0
    """
    require("fastapi", "uvicorn", "sse_starlette", extra="serve", what="The explorer")
    from headtrace.explorer.server import app as serving

    serving.check_token(token)
    _check_atlas(atlas)
    bound = serving.bind(host, port)
    try:
        settings = _settings(bound, host, token, max_tokens, max_waiting)
        names = [name for name in (model, beside) if name is not None]
        app = _application(names, settings, atlas, run, revision, dtype, (device, device_map))
        _run(serving.Server(app), bound, serving.url(bound, settings.token), open_page)
    finally:
        bound.close()


def _check_atlas(atlas: str | None) -> None:
    """What is in it is found out with the model that it is of; that it is there, at once."""
    import os

    if atlas is not None and not os.path.isdir(atlas):
        raise InputError(
            f"--atlas {atlas!r}: there is no such folder. Give one of headtrace atlas or headtrace interpret."
        )


def _settings(bound: socket, host: str, token: str | None, max_tokens: int, max_waiting: int) -> Settings:
    import secrets

    from headtrace.explorer.panels import Settings
    from headtrace.explorer.server import app as serving

    loopback = serving.is_loopback(bound)
    if not loopback and token is None:
        token = secrets.token_urlsafe(24)
    hosts = () if loopback else serving.own_names(host)
    return Settings(
        max_tokens=max_tokens, max_waiting=max_waiting, token=token, hosts=hosts, loopback=loopback
    )


def _application(
    names: list[str],
    settings: Settings,
    atlas: str | None,
    run: str | None,
    revision: str | None,
    dtype: str,
    where: tuple[str, str | None],
) -> FastAPI:
    """Everything loaded that the server needs; what can be found out without a model comes first."""
    from headtrace.explorer.server.app import create_app

    source = evidence = None
    if run is not None:
        from headtrace.explorer.panels.circuits import RunSource

        source = RunSource(run)
    first, *others = names
    models = [options.load_model(first, revision, dtype, *where)]
    models += [options.load_model(name, None, dtype, *where) for name in others]
    if atlas is not None:
        from headtrace.explorer.panels.why import AtlasEvidence

        evidence = AtlasEvidence(atlas, models[0])
    return create_app(models, settings, atlas=evidence, run=source, log=_log)


def _log(text: str) -> None:
    """A mistake of the server, line by line: what is in it cannot move the cursor."""
    for line in text.splitlines():
        options.warn(line)


def _run(server: Server, bound: socket, address: str, open_page: bool) -> None:
    """Serve until it is told to stop; an interrupt ends like any other command's."""
    import asyncio
    import webbrowser

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            options.console.print(address, markup=False, highlight=False, soft_wrap=True)
            options.note("This is the explorer's address. Ctrl-C stops it.")
            if open_page:
                await asyncio.to_thread(webbrowser.open, address)
        await serving

    asyncio.run(serve())
