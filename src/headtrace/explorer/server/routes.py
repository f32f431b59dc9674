"""Routes: a request in, its work into the queue, an answer out. Computation is POST; GET never changes anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, TypeAdapter
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headtrace.circuits.files import dumps
from headtrace.explorer.page import json_for_script, page, page_data
from headtrace.explorer.panels import PANELS, Panel, Session, circuits, mechanisms, prompts
from headtrace.explorer.panels.circuits import CircuitView, RunMap, RunPage
from headtrace.explorer.panels.mechanisms import MechanismView, QuestionRequest
from headtrace.explorer.panels.prompts import ExampleView, HeadPattern, ServerView, StarterView
from headtrace.explorer.panels.requests import CircuitRequest
from headtrace.explorer.panels.session import NotFoundError
from headtrace.explorer.server.http import RefusedError, errors, failure, refusal
from headtrace.explorer.server.jobs import FINAL, Compute, Finished, Job, JobView
from headtrace.mechanism import Mechanism
from headtrace.validation import document

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from headtrace.circuits import Circuit
    from headtrace.request import TraceRequest

PARTIAL_SECONDS = 0.5
"""Seconds between two partial circuits that are sent while one is traced."""
GRACE_SECONDS = 5
"""Seconds that a server that is stopping waits for responses and streams to end."""

Id = Annotated[str, Path(max_length=64)]
Index = Annotated[int, Path(ge=0, le=100_000)]
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "event": {"enum": ["queued", "progress", "partial", *FINAL]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["id", "event", "data"],
}
BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
EVENTS = {"content": {"text/event-stream": {"schema": EVENT}}, "description": "Events of the job"}
FILE = {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "A circuit file"}
PAGE = {
    "content": {"text/html": {"schema": {"type": "string"}}},
    "description": "A page that needs no server",
}

router = APIRouter(prefix="/api")

# -- work in the queue -----------------------------------------------------------------------------------------


async def computed(
    request: Request,
    work: Callable[[Session], Any],
    media_type: str = "application/json",
    file: str | None = None,
) -> Response:
    """The response with what ``work`` returns in the worker, as JSON unless it is bytes; with ``file``, to be saved
    under this name. If the client disconnects while its work waits, the work is cancelled."""
    session: Session = request.app.state.session
    compute: Compute = request.app.state.quick
    job = compute.submit(lambda _: as_sent(work(session)))
    if not await _until_disconnected(request.receive, _ended(job)):
        compute.cancel(job)
        return Response(status_code=499)
    if job.error is not None:
        return failure(job.error)
    if job.result is None:
        raise RefusedError(503, "stopping", "The server is stopping.")
    headers = {} if file is None else {"Content-Disposition": f'attachment; filename="{file}"'}
    return Response(job.result, media_type=media_type, headers=headers)


def as_sent(found: Any) -> bytes:
    """An answer as bytes. Made in the worker: encoding a long one would keep other clients waiting."""
    if isinstance(found, bytes):
        return found
    if isinstance(found, BaseModel):
        return found.model_dump_json().encode()
    return TypeAdapter(list[BaseModel]).dump_json(found, serialize_as_any=True)


async def _ended(job: Job[Any]) -> None:
    with _notified(job) as news:
        while not job.ended:
            await news.wait()
            news.clear()


async def _until_disconnected(receive: Receive, work: Any) -> bool:
    """Await ``work`` until the client disconnects; whether it stayed to the end."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


@contextmanager
def _notified(job: Job[Any]) -> Generator[asyncio.Event]:
    """An event of this loop that is set whenever a job, in its own thread, publishes something."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop may be closed when a job ends
            loop.call_soon_threadsafe(news.set)

    with job.listening(notify):
        yield news


# -- prompts and panels ----------------------------------------------------------------------------------------


@router.get("/server", response_model=ServerView, responses=errors())
async def server(request: Request) -> ServerView:
    return prompts.server_view(request.app.state.session)


@router.get("/tasks/{name}/examples", response_model=list[ExampleView], responses=errors(404))
async def examples(
    request: Request,
    name: Id,
    count: Annotated[int, Query(ge=1, le=100)] = 10,
    seed: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    return await computed(request, lambda session: prompts.examples(session, name, count, seed))


@router.get("/tasks/{name}/starter", response_model=StarterView, responses=errors(404))
async def starter(request: Request, name: Id) -> Response:
    """An example of a task that the model answers rightly, if it does so with any of twenty."""
    return await computed(request, lambda session: prompts.starter(session, name))


@router.get("/recordings/{id}/patterns", response_class=Response, responses={200: BINARY, **errors(404)})
async def patterns(request: Request, id: Id) -> Response:
    """One byte per attention weight, as `RecordingView` says."""
    return await computed(
        request, lambda session: prompts.pattern_bytes(session, id), "application/octet-stream"
    )


@router.get("/recordings/{id}/heads/{layer}/{head}", response_model=HeadPattern, responses=errors(404))
async def head_pattern(request: Request, id: Id, layer: Index, head: Index) -> Response:
    return await computed(request, lambda session: prompts.head_pattern(session, id, layer, head))


def add_panel(panel: Panel) -> None:
    """Serve a panel at ``POST /api/NAME``."""

    async def answer(request: Request, asked: Any) -> Response:
        return await computed(request, lambda session: panel.compute(session, asked))

    answer.__annotations__ |= {"request": Request, "asked": panel.request}
    answer.__doc__ = panel.request.__doc__
    add = router.post(
        f"/{panel.name}", name=panel.name, response_model=panel.answer, responses=errors(404, 408)
    )
    add(answer)


for each in PANELS:
    add_panel(each)

# -- traces, which are jobs ------------------------------------------------------------------------------------


@router.post("/trace", status_code=202, response_model=JobView, responses=errors(404, 408))
async def trace(request: Request, asked: CircuitRequest) -> JobView:
    session: Session = request.app.state.session
    compute: Compute = request.app.state.compute
    prompt = session.clean(asked.recording).prompt  # the recording itself is not held while the job waits
    wanted = asked.trace_request(prompt)
    return compute.submit(lambda job: traced(session, wanted, prompt.model, job), keep=True).view()


def traced(session: Session, request: TraceRequest, model: int, job: Job[Finished]) -> Finished:
    """Trace a circuit inside a job, which publishes partial circuits and may be cancelled."""
    published = 0.0

    def partial(circuit: Circuit) -> None:
        nonlocal published
        job.check()
        if time.monotonic() - published > PARTIAL_SECONDS:
            job.publish("partial", json_for_script({"circuit": page_data(circuit)}))
            published = time.monotonic()

    view, circuit = circuits.trace(session, request, model, progress=job.progress, partial=partial)
    return Finished(view.model_dump_json(), circuit)


@router.post("/mechanism", status_code=202, response_model=JobView, responses=errors(404, 408))
async def mechanism(request: Request, asked: QuestionRequest) -> JobView:
    """Words and heads that matter, then the mechanism, then its measurements: each is sent as a ``partial`` event."""
    session: Session = request.app.state.session
    compute: Compute = request.app.state.compute
    prompt = session.clean(asked.recording).prompt

    def work(job: Job[Finished]) -> Finished:
        def partial(view: MechanismView) -> None:
            job.check()
            job.publish("partial", view.model_dump_json())

        view, found = mechanisms.explain(session, asked, prompt, progress=job.progress, partial=partial)
        return Finished(view.model_dump_json(), found)

    return compute.submit(work, keep=True).view()


def found_job(request: Request, id: str) -> Job[Any]:
    compute: Compute = request.app.state.compute
    job = compute.find(id)
    if job is None:
        raise NotFoundError(
            "no_job", "There is no such job: it was too long ago, or the server was restarted since."
        )
    return job


def found_circuit(request: Request, id: str) -> Finished:
    """The result of a job, or an error that says why there is none."""
    job = found_job(request, id)
    if job.state == "failed":
        raise RefusedError(409, "failed", job.view().error or "")
    if job.state == "cancelled":
        raise RefusedError(409, "cancelled", "This job was cancelled. Start it again.")
    if job.result is None:
        raise RefusedError(
            409, "not_yet", "The circuit is still being traced: listen to the events of its job."
        )
    return job.result


@router.get("/jobs/{id}", response_model=JobView, responses=errors(404))
async def job(request: Request, id: Id) -> JobView:
    return found_job(request, id).view()


@router.delete("/jobs/{id}", response_model=JobView, responses=errors(404))
async def cancel(request: Request, id: Id) -> JobView:
    """Cancel a job; one that has ended does not change."""
    found, compute = found_job(request, id), request.app.state.compute
    compute.cancel(found)
    return found.view()


class EventStream(EventSourceResponse):
    """The events of a job after the one with a number, as server-sent events; limited in how many are open."""

    def __init__(self, job: Job[Any], after: int, compute: Compute, most: int) -> None:
        super().__init__(_stream(job, after), sep="\n", shutdown_grace_period=GRACE_SECONDS)
        self.job, self.compute, self.most = job, compute, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = self.compute.listeners
        if now >= self.most:
            message = f"{now} clients listen already. Ask for /api/jobs/{self.job.id} now and then."
            await refusal(429, "busy", message, {"Retry-After": "5"})(scope, receive, send)
            return
        self.compute.listeners += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.compute.listeners -= 1


async def _stream(job: Job[Any], after: int) -> AsyncGenerator[dict[str, str]]:
    """Each event with its number, by which a client that reconnects says where to go on, until the job has ended."""
    with _notified(job) as news:
        ended = False
        while not ended:
            news.clear()
            ended = job.ended
            for event in job.events(after):
                after = event.number
                yield {"id": str(event.number), "event": event.name, "data": event.data}
                ended |= event.name in FINAL
            if not ended:
                await news.wait()


@router.get("/jobs/{id}/events", response_class=Response, responses={200: EVENTS, 204: {}, **errors(404)})
async def events(
    request: Request, id: Id, last_event_id: Annotated[str | None, Header(max_length=20)] = None
) -> Response:
    """Events as they happen. A client that reconnects names the last one it received, and goes on after it."""
    found, state = found_job(request, id), request.app.state
    after = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else 0
    if found.ended and not found.events(after):
        return Response(status_code=204)  # nothing more will come: browsers then do not reconnect
    return EventStream(found, after, state.compute, state.session.settings.max_listeners)


@router.get("/jobs/{id}/circuit", response_model=CircuitView | MechanismView, responses=errors(404, 409))
async def circuit(request: Request, id: Id) -> Response:
    return Response(found_circuit(request, id).json, media_type="application/json")


@router.get("/jobs/{id}/circuit.json", response_class=Response, responses={200: FILE, **errors(404, 409)})
async def circuit_file(request: Request, id: Id) -> Response:
    """The circuit file; of a mechanism, its file, which holds the circuit."""
    found = found_circuit(request, id).value
    if isinstance(found, Mechanism):
        return await computed(request, lambda _: document(found.to_dict()).encode(), file="mechanism.json")
    return await computed(request, lambda _: dumps(found).encode(), file="circuit.json")


@router.get("/jobs/{id}/page.html", response_class=Response, responses={200: PAGE, **errors(404, 409)})
async def circuit_page(request: Request, id: Id) -> Response:
    found = found_circuit(request, id).value
    circuit, told = (found.circuit, found) if isinstance(found, Mechanism) else (found, None)
    return await computed(
        request, lambda _: page(circuit, mechanism=told).encode(), "text/html", "circuit.html"
    )


# -- a run -----------------------------------------------------------------------------------------------------


@router.get("/run/prompts", response_model=RunPage, responses=errors(404))
async def run_prompts(
    request: Request,
    search: Annotated[str, Query(max_length=1_000)] = "",
    family: Annotated[int | None, Query(ge=-1, le=10**9)] = None,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Response:
    return await computed(request, lambda session: session.run.prompts(search, family, offset, limit))


@router.get("/run/map", response_model=RunMap, responses=errors(404))
async def run_map(request: Request) -> Response:
    return await computed(request, lambda session: session.run.map)


@router.get("/run/circuits/{id:path}", response_model=CircuitView, responses=errors(404))
async def run_circuit(request: Request, id: Annotated[str, Path(max_length=1_000)]) -> Response:
    return await computed(request, lambda session: session.run.circuit(id))


# -- the page itself -------------------------------------------------------------------------------------------

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def static_files() -> dict[str, tuple[Traversable, str]]:
    """The explorer's own files by their path in the address, with their types. Nothing else can be read."""
    found: dict[str, tuple[Traversable, str]] = {}
    for folder in ("app", "page"):
        for item in (files("headtrace.explorer") / folder).iterdir():
            kind = TYPES.get("." + item.name.rpartition(".")[2])
            if kind is not None and item.is_file() and item.name != "template.html":
                found[f"{folder}/{item.name}"] = item, kind
    return found


def static_routes(known: Mapping[str, tuple[Traversable, str]]) -> APIRouter:
    """Routes of the start page and its modules, which are not part of the API."""
    static = APIRouter(include_in_schema=False)

    @static.get("/static/{name:path}", responses=errors(404))
    async def module(name: str) -> Response:
        if name not in known:
            raise NotFoundError("not_found", "There is nothing at this address.")
        item, kind = known[name]
        return Response(item.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})

    @static.get("/")
    async def index() -> Response:
        return await module("app/index.html")

    return static
