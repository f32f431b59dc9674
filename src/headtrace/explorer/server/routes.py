"""Routes: a request in, its work into the queue, an answer out. Computation is POST; GET never changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from headtrace.explorer.server.answers import RefusedError, errors, failure, no_job
from headtrace.explorer.server.events import EventStream, Listeners, finished, until_gone
from headtrace.explorer.server.jobs import FINAL, Compute, Finished, Job
from headtrace.explorer.server.schemas import (
    CircuitView,
    ExampleView,
    HeadPattern,
    InterveneRequest,
    InterveneView,
    JobView,
    PromptRequest,
    RecordingView,
    RunMap,
    RunPage,
    ServerView,
    TraceRequest,
    WhyRequest,
    WhyView,
)
from headtrace.explorer.server.service import Explorer, circuit_file, circuit_page

router = APIRouter(prefix="/api")

Id = Annotated[str, Path(max_length=64)]
BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "event": {"enum": ["queued", "progress", "partial", *FINAL]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["id", "event", "data"],
}
EVENTS = {"content": {"text/event-stream": {"schema": EVENT}}, "description": "Events of the job"}
FILE = {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "A circuit file"}
PAGE = {
    "content": {"text/html": {"schema": {"type": "string"}}},
    "description": "A page that needs no server",
}


async def computed(
    request: Request,
    work: Callable[[Explorer], Any],
    media_type: str = "application/json",
    file: str | None = None,
) -> Response:
    """The answer that ``work`` gives in the worker, as JSON unless it is bytes; with ``file``, to be saved under this
    name. A client that goes away while its work waits takes it back."""
    explorer: Explorer = request.app.state.explorer
    compute: Compute = request.app.state.compute
    job = compute.submit(lambda _: as_sent(work(explorer)))
    if not await until_gone(request.receive, finished(job)):
        compute.cancel(job)
        return Response(status_code=499)
    if job.error is not None:
        return failure(job.error)
    if job.result is None:
        raise RefusedError(503, "stopping", "The server is stopping.")
    headers = {} if file is None else {"Content-Disposition": f'attachment; filename="{file}"'}
    return Response(job.result, media_type=media_type, headers=headers)


def as_sent(found: Any) -> bytes:
    """An answer as bytes, made in the worker as well: a long one would keep other clients waiting."""
    if isinstance(found, bytes):
        return found
    if isinstance(found, BaseModel):
        return found.model_dump_json().encode()
    return TypeAdapter(list[BaseModel]).dump_json(found, serialize_as_any=True)


# -- what is served, and prompts -------------------------------------------------------------------------------


@router.get("/server", response_model=ServerView, responses=errors())
async def server(request: Request) -> ServerView:
    explorer: Explorer = request.app.state.explorer
    return explorer.server


@router.get("/tasks/{name}/examples", response_model=list[ExampleView], responses=errors(404))
async def examples(
    request: Request,
    name: Id,
    count: Annotated[int, Query(ge=1, le=100)] = 10,
    seed: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    return await computed(request, lambda explorer: explorer.examples(name, count, seed))


@router.post("/record", response_model=RecordingView, responses=errors(408))
async def record(request: Request, prompt: PromptRequest) -> Response:
    return await computed(request, lambda explorer: explorer.record(prompt))


@router.get("/recordings/{id}/patterns", response_class=Response, responses={200: BINARY, **errors(404)})
async def patterns(request: Request, id: Id) -> Response:
    """One byte per attention weight, as `RecordingView` says."""
    return await computed(request, lambda explorer: explorer.patterns(id), "application/octet-stream")


@router.get("/recordings/{id}/heads/{layer}/{head}", response_model=HeadPattern, responses=errors(404))
async def head_pattern(
    request: Request,
    id: Id,
    layer: Annotated[int, Path(ge=0, le=100_000)],
    head: Annotated[int, Path(ge=0, le=100_000)],
) -> Response:
    return await computed(request, lambda explorer: explorer.head(id, layer, head))


@router.post("/why", response_model=WhyView, responses=errors(408))
async def why(request: Request, asked: WhyRequest) -> Response:
    return await computed(request, lambda explorer: explorer.why(asked))


@router.post("/intervene", response_model=InterveneView, responses=errors(408))
async def intervene(request: Request, asked: InterveneRequest) -> Response:
    return await computed(request, lambda explorer: explorer.intervene(asked))


# -- jobs ------------------------------------------------------------------------------------------------------


def found_job(request: Request, id: str) -> Job[Any]:
    compute: Compute = request.app.state.compute
    job = compute.find(id)
    if job is None:
        raise no_job()
    return job


def found_circuit(request: Request, id: str) -> Finished:
    """What a job has found, or why it has not."""
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


@router.post("/trace", status_code=202, response_model=JobView, responses=errors(408))
async def trace(request: Request, asked: TraceRequest) -> JobView:
    explorer: Explorer = request.app.state.explorer
    compute: Compute = request.app.state.compute
    explorer.model(asked.prompt)
    return compute.submit(lambda job: explorer.trace(asked, job), keep=True).view()


@router.get("/jobs/{id}", response_model=JobView, responses=errors(404))
async def job(request: Request, id: Id) -> JobView:
    return found_job(request, id).view()


@router.delete("/jobs/{id}", response_model=JobView, responses=errors(404))
async def cancel(request: Request, id: Id) -> JobView:
    """Cancel a job; one that has ended stays as it is."""
    found, compute = found_job(request, id), request.app.state.compute
    compute.cancel(found)
    return found.view()


@router.get("/jobs/{id}/events", response_class=Response, responses={200: EVENTS, 204: {}, **errors(404)})
async def events(
    request: Request, id: Id, last_event_id: Annotated[str | None, Header(max_length=20)] = None
) -> Response:
    """Events as they happen. A client that comes back says which one it heard last, and goes on after it."""
    found, listeners = found_job(request, id), request.app.state.listeners
    assert isinstance(listeners, Listeners)
    after = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else 0
    if found.ended and not found.told(after):
        return Response(status_code=204)  # there is nothing more to come: browsers do not ask again
    return EventStream(found, listeners, after)


@router.get("/jobs/{id}/circuit", response_model=CircuitView, responses=errors(404, 409))
async def circuit(request: Request, id: Id) -> Response:
    return Response(found_circuit(request, id).told, media_type="application/json")


@router.get("/jobs/{id}/circuit.json", response_class=Response, responses={200: FILE, **errors(404, 409)})
async def circuit_as_file(request: Request, id: Id) -> Response:
    found = found_circuit(request, id).kept
    return await computed(request, lambda _: circuit_file(found), file="circuit.json")


@router.get("/jobs/{id}/page.html", response_class=Response, responses={200: PAGE, **errors(404, 409)})
async def circuit_as_page(request: Request, id: Id) -> Response:
    found = found_circuit(request, id).kept
    return await computed(request, lambda _: circuit_page(found), "text/html", "circuit.html")


# -- a run -----------------------------------------------------------------------------------------------------


@router.get("/run/prompts", response_model=RunPage, responses=errors(404))
async def run_prompts(
    request: Request,
    search: Annotated[str, Query(max_length=1_000)] = "",
    family: Annotated[int | None, Query(ge=-1, le=10**9)] = None,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Response:
    return await computed(request, lambda explorer: explorer.run_prompts(search, family, offset, limit))


@router.get("/run/map", response_model=RunMap, responses=errors(404))
async def run_map(request: Request) -> Response:
    return await computed(request, Explorer.run_map)


@router.get("/run/circuits/{id:path}", response_model=CircuitView, responses=errors(404))
async def run_circuit(request: Request, id: Annotated[str, Path(max_length=1_000)]) -> Response:
    return await computed(request, lambda explorer: explorer.run_circuit(id))
