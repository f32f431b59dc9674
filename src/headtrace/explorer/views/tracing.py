"""A circuit, shown while it is traced.

>>> import headtrace
>>> from headtrace.explorer.server.schemas import PromptRequest, RootRequest
>>> prompt = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> asked = TraceRequest(prompt=prompt, root=RootRequest(answer=" Mary", wrong=" John"), paths="attention")
>>> sizes = []
>>> view, circuit = trace_view(
...     headtrace.Tracer(headtrace.load("builtin")), asked, partial=lambda found: sizes.append(len(found.edges))
... )
>>> sizes == sorted(sizes), sizes[0] < sizes[-1] == len(circuit.edges)
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable

from headtrace.circuits import Circuit
from headtrace.explorer.page import page_data
from headtrace.explorer.server.schemas import CircuitView, TraceRequest
from headtrace.explorer.views import snippets
from headtrace.explorer.views.prompts import given
from headtrace.progress import Progress
from headtrace.tracing import Tracer


def trace_view(
    tracer: Tracer,
    request: TraceRequest,
    progress: Progress | None = None,
    partial: Callable[[Circuit], None] | None = None,
) -> tuple[CircuitView, Circuit]:
    """The circuit that was asked for; ``partial`` is given it as it grows, and may raise to end it, as may
    ``progress``."""
    wanted = tracer_for(tracer, request)
    circuit = wanted.trace(
        given(request.prompt),
        bos=request.prompt.bos,
        paths=request.paths,
        counterfactual=request.counterfactual,
        progress=progress,
        grown=partial,
        **snippets.root_options(request.root),
    )
    return circuit_view(circuit, snippets.trace_lines(wanted, request)), circuit


def tracer_for(tracer: Tracer, request: TraceRequest) -> Tracer:
    """A tracer with the method and the budget that were asked for, which shares the composed weights."""
    asked = request.max_firings, request.min_influence
    if request.method == tracer.method.name and asked == (None, None):
        return tracer
    made = Tracer(
        tracer.model,
        method=tracer.method if request.method == tracer.method.name else request.method,
        max_firings=request.max_firings or tracer.max_firings,
        min_influence=tracer.min_influence if request.min_influence is None else request.min_influence,
        patterns=tracer.patterns,
    )
    made.composer = tracer.composer
    return made


def circuit_view(circuit: Circuit, python: str) -> CircuitView:
    """A circuit with what its drawing needs."""
    return CircuitView(circuit=page_data(circuit), python=python)
