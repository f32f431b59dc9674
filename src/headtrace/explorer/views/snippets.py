"""The Python lines that compute what a view shows, to copy: whole scripts, which tests run.

>>> import headtrace
>>> print(record_lines(headtrace.load("builtin"), PromptRequest(text="When Mary and John")))
import headtrace
<BLANKLINE>
model = headtrace.load('builtin')
prompt = 'When Mary and John'
recording = model.record(prompt)
print(recording.top_answers(10))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headtrace.explorer.server.schemas import (
    InterveneRequest,
    PromptRequest,
    RootRequest,
    TraceRequest,
    WhyRequest,
)
from headtrace.tracing.sweep import Budget

if TYPE_CHECKING:
    from headtrace.causal.changes import Change
    from headtrace.models import Model
    from headtrace.tracing import Tracer


def opening(model: Model, prompt: PromptRequest) -> list[str]:
    """The model and the prompt."""
    dtype = None if model.own_dtype == "float32" else model.own_dtype
    load = call("headtrace.load", model.name, revision=model.revision, dtype=dtype)
    given = prompt.token_ids if prompt.text is None else prompt.text
    return ["import headtrace", "", f"model = {load}", f"prompt = {given!r}"]


def call(function: str, *args: Any, raw: str = "", **options: Any) -> str:
    """A call; options that are None are left out, and ``raw`` comes before the arguments as it stands.

    >>> call("model.record", raw="prompt", bos=None, last_logits=True)
    'model.record(prompt, last_logits=True)'
    """
    named = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return f"{function}({', '.join([*([raw] if raw else []), *map(repr, args), *named])})"


def root_options(root: RootRequest) -> dict[str, Any]:
    """A root as ``Tracer.trace`` and ``Tracer.ask`` take it."""
    return {"answer": root.answer, "wrong": root.wrong, "root": root.kind}


def record_lines(model: Model, prompt: PromptRequest) -> str:
    """A recorded prompt and its likeliest answers."""
    recording = f"recording = {call('model.record', raw='prompt', bos=prompt.bos)}"
    shown = min(10, model.d_vocab)
    return "\n".join([*opening(model, prompt), recording, f"print(recording.top_answers({shown}))"])


def tracer_call(tracer: Tracer) -> str:
    """How a tracer is made: its method, its budget, and the options that are not the usual ones."""
    method = tracer.method
    limit = {} if tracer.max_firings == Budget.max_firings else {"max_firings": tracer.max_firings}
    limit |= {"min_influence": tracer.min_influence}
    named = {} if method.name == "acc++" else {"method": method.name}
    own = {each.name: (getattr(method, each.name), each.default) for each in fields(method)}
    options = {name: value for name, (value, usual) in own.items() if value != usual and not callable(value)}
    return call("headtrace.Tracer", raw="model", **named, **options, **limit)


def why_lines(tracer: Tracer, request: WhyRequest) -> str:
    """The causes of a firing, its channels and what it moved."""
    f, prompt, root = request.firing, request.prompt, request.root
    where = f"L{f.layer}H{f.head}:{f.dest}:{f.src}"
    lines = [*opening(tracer.model, prompt), f"tracer = {tracer_call(tracer)}"]
    if root is None:
        lines.append(f"recording = {call('model.record', raw='prompt', bos=prompt.bos)}")
    else:
        lines.insert(1, "from headtrace.models.frozen import CONTENT_FIELDS")
        question = call("tracer.ask", raw="prompt", bos=prompt.bos, **root_options(root))
        lines += [f"question = {question}", "recording = model.record(question.ids, keep=CONTENT_FIELDS)"]
    lines += [
        f"why = {call('tracer.explain', raw='prompt', firing=where, bos=prompt.bos)}",
        f"channels = model.decompose(recording, {where!r})",
        f"moved = headtrace.tracing.moved(recording, {where!r}{'' if root is None else ', question.root'})",
        'print(why, channels, moved, sep="\\n\\n")',
    ]
    return "\n".join(lines)


def trace_lines(tracer: Tracer, request: TraceRequest) -> str:
    """A circuit."""
    prompt = request.prompt
    options = {**root_options(request.root), "paths": request.paths, "bos": prompt.bos}
    trace = call("tracer.trace", raw="prompt", **options, counterfactual=request.counterfactual)
    lines = [f"tracer = {tracer_call(tracer)}", f"circuit = {trace}", "print(circuit.summary())"]
    return "\n".join([*opening(tracer.model, prompt), *lines])


def change_lines(tracer: Tracer, request: InterveneRequest, changes: Sequence[Change]) -> str:
    """The model under interventions."""
    prompt = request.prompt
    lines = opening(tracer.model, prompt)
    lines[1:1] = [
        "from headtrace.causal import ComponentChange, Signal, SignalChange, continued, metric_of, rerun",
        "from headtrace.vocabulary import Component, Firing, Site",
    ]
    ids = f"{call('model.to_ids', raw='prompt', bos=prompt.bos)}"
    if request.root is not None:
        asked = call("tracer.ask", raw="prompt", bos=prompt.bos, **root_options(request.root))
        lines += [f"tracer = {tracer_call(tracer)}", f"question = {asked}"]
    lines += [f"recording = model.record({ids})", "changes = ["]
    lines += [*(f"    {change!r}," for change in changes), "]", "changed = rerun(recording, changes)"]
    lines.append(f"print(changed.top_answers({min(10, tracer.model.d_vocab)}))")
    if request.root is not None:
        lines += [
            "asked = model.record(question.ids)",
            "metric = metric_of(question.root, asked)",
            "print(metric.name, metric.of(asked), metric.of(rerun(asked, changes)))",
        ]
    if request.generate:
        lines += [
            f"generated = [continued(recording, {request.generate}, these) for these in ([], changes)]",
            "print(*(model.token_labels(ids) for ids in generated), sep='\\n')",
        ]
    return "\n".join(lines)


def run_lines(place: str, id: str) -> str:
    """A circuit of a run."""
    return "\n".join(
        [
            "import headtrace",
            "",
            f"run = headtrace.open_run({place!r})",
            f"circuit = run.circuit({id!r})",
            "print(circuit.summary())",
        ]
    )
