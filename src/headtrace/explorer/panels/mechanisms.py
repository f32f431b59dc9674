"""The first panel of a prompt: why this answer? What matters in the prompt, the heads that matter, the mechanism.

The work comes in parts, each of which is shown as soon as it is there: first the words, with what exchanging them did,
and the heads with most flow; then the mechanism; then what was measured of each of its steps.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> recorded = session.record(PromptRequest(text="When Mary and John went to the store, John gave a drink to"))
>>> question(session, QuestionRequest(recording=recorded.id)).wrong.token
'John'
>>> stages = []
>>> view, _ = explain(session, QuestionRequest(recording=recorded.id), partial=lambda view: stages.append(view.stage))
>>> stages, view.stage, view.words[0].changes[0].before
(['heads', 'cards'], 'badges', 'Mary')
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch.nn.functional import adaptive_max_pool2d

from headtrace.causal.importance import WordImportance
from headtrace.errors import InputError
from headtrace.explorer.page import mechanism_data
from headtrace.explorer.panels.prompts import Answer, answer_view, named, readable
from headtrace.explorer.panels.requests import Answers, PromptRequest, RecordingRequest, View, python_lines
from headtrace.explorer.panels.session import RecordedPrompt, Session
from headtrace.mechanism.asking import tell
from headtrace.mechanism.evidence import measure_steps
from headtrace.progress import scaled
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.roots import Likelihood, LogitDifference
from headtrace.tracing.content import moved
from headtrace.tracing.replacements import BUDGET, ask
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.mechanism import Mechanism
    from headtrace.models import Model, Recording
    from headtrace.progress import Progress
    from headtrace.tracing.tracer import PromptComparison

SHOWN_HEADS = 12
LEAST_BUDGET, TOKENS_RUN = 24, 6_000
"""Of long prompts fewer changed ones are run: about so many tokens in all, but never fewer than 24 prompts."""
SUGGESTED = 6
"""Replacements of a word that are offered, those that change the answer most."""
THUMBNAIL = 40
"""Pixels across a small picture of a head's attention."""
WORDS = 3
"""Tokens that a head raises or lowers most."""

Stage = Literal["heads", "cards", "badges"]


class QuestionRequest(RecordingRequest):
    """Why does the model answer this rather than that? What is left out is chosen as `headtrace.why` chooses it."""

    answer: Annotated[Answers | None, Field(description="The model's own if left out.")] = None
    wrong: Annotated[Answers | None, Field(description="The strongest rival if left out.")] = None
    alone: bool = False
    """How likely the answer is, rather than how much likelier than a rival."""


class QuestionView(View):
    """An answer and the strongest rival; an answer of several tokens has none."""

    answer: list[Answer]
    wrong: Answer | None


class ReplacementView(View):
    """A word exchanged for another, and what that does to the metric."""

    before: str
    after: str
    text: str
    value: float
    effect: float
    flips: bool


class WordView(View):
    """A word of the prompt, and what is lost where it is exchanged."""

    text: str
    positions: list[int]
    kind: str
    mean: float
    low: float
    high: float
    flips: int
    changes: list[ReplacementView]


class HeadRow(View):
    """A head component that matters: what of the answer flows through what it read and wrote here."""

    layer: int
    head: int
    dest: int
    src: int
    flow: float
    attention: float
    other_attention: float | None
    raises: list[str]
    lowers: list[str]
    step: int | None = None
    """The step of the mechanism that it is part of."""
    role: str | None = None
    """What that step does, in words."""
    thumbnail: str
    """Its attention as a square of bytes (255: all of it), in base64."""


class MechanismView(View):
    """Why the model answers as it does, as far as it is computed."""

    stage: Stage
    measure: str
    value: float
    """The metric on the prompt."""
    answer: str
    wrong: str | None
    importance: list[float | None]
    """By token, the mean loss where its word is exchanged; null where it was not."""
    words: list[WordView]
    tried: int
    """Changed prompts that were run."""
    heads: list[HeadRow]
    mechanism: dict[str, Any] | None
    """For the drawing (`headtrace.explorer.page.mechanism_data`)."""
    reason: str | None
    """Why there is nothing to draw, where there is not."""
    python: str


def question(session: Session, request: QuestionRequest) -> QuestionView:
    """The answer and the rival that `headtrace.why` would choose."""
    recorded = session.clean(request.recording)
    root = resolved(session, recorded.prompt, request).root
    assert isinstance(root, LogitDifference | Likelihood)
    wrong = (root.wrong if isinstance(root, LogitDifference) else None) or ()
    recording, model = recorded.recording, recorded.recording.model
    chances = recording.last_logits().softmax(-1)

    def views(ids: tuple[int, ...]) -> list[Answer]:
        return [answer_view(model, id, float(chances[id])) for id in ids]

    return QuestionView(answer=views(tuple(root.answer or ())), wrong=next(iter(views(tuple(wrong))), None))


def resolved(session: Session, prompt: PromptRequest, request: QuestionRequest) -> ResolvedRequest:
    """A question about a prompt, with what it leaves open chosen as `headtrace.why` does."""
    model, wrong = session.models[prompt.model], None if request.alone else request.wrong
    if request.answer is None and wrong is not None:
        raise InputError("A wrong answer goes with an answer: give both, or leave out both.")
    asked = ask(model, prompt.trace_request.prompt, request.answer, wrong, paths="difference", bos=prompt.bos)
    if request.alone and isinstance(asked.root, LogitDifference):
        asked = replace(asked.request, about={"answer": asked.root.answer}).resolve(model)
    session.resolve(asked.request, prompt.model)  # within the limits of the server
    return asked


def explain(
    session: Session,
    request: QuestionRequest,
    prompt: PromptRequest | None = None,
    progress: Progress | None = None,
    partial: Callable[[MechanismView], None] | None = None,
) -> tuple[MechanismView, Mechanism]:
    """The mechanism of a recorded prompt (or of ``prompt``, where its recording is not kept any more). ``partial`` gets
    what is there before the whole is; it and ``progress`` may raise to stop."""
    recorded = session.clean(request.recording) if prompt is None else session.record(prompt)
    prompt = recorded.prompt
    tracer = session.tracers[prompt.model]
    asked = resolved(session, prompt, request)
    budget = max(LEAST_BUDGET, min(BUDGET, TOKENS_RUN // len(asked.ids)))
    compared = tracer.compare(asked, scaled(progress, 0, 60, 100), budget=budget)
    labels = readable(tracer.model, compared.circuit.prompt.token_ids)
    if labels != compared.circuit.prompt.tokens:  # for the drawing, the steps and the sentence
        shown = replace(compared.circuit.prompt, tokens=labels)
        compared = replace(compared, circuit=replace(compared.circuit, prompt=shown))
    view = _view(recorded, compared, _python(tracer.model, asked.request, budget))
    if partial is not None:
        partial(view)
    found = tell(tracer, compared, measure=False, progress=scaled(progress, 60, 20, 100))
    view = _with_mechanism(view, found, "cards")
    if not found.steps:
        return view.model_copy(update={"stage": "badges"}), found
    if partial is not None:
        partial(view)
    steps, test = measure_steps(compared.flows, found.steps, 0, scaled(progress, 80, 20, 100))
    found = replace(found, steps=steps, test=test)
    return _with_mechanism(view, found, "badges"), found


def _view(recorded: RecordedPrompt, compared: PromptComparison, python: str) -> MechanismView:
    """What is known before there is a mechanism: words and heads."""
    circuit, measured = compared.circuit, compared.measured
    assert measured is not None
    assert circuit.difference is not None
    own = [WordImportance.of(word, found) for word in measured.words if (found := measured.of(word))]
    words = [WordView.model_validate(word) for word in own]
    for word in words:
        word.changes = sorted(word.changes, key=lambda change: (not change.flips, -abs(change.effect)))[
            :SUGGESTED
        ]
    root: Any = circuit.root
    return MechanismView(
        stage="heads",
        measure=circuit.root.measure,
        value=circuit.difference.value,
        answer="".join(root.answer_tokens or ()),
        wrong=None if not getattr(root, "wrong_tokens", None) else "".join(root.wrong_tokens),
        importance=list(measured.by_token(len(circuit.prompt.token_ids))),
        words=words,
        tried=len(measured.changes),
        heads=head_rows(circuit, recorded.recording),
        mechanism=None,
        reason=circuit.reason,
        python=python,
    )


def head_rows(circuit: Circuit, recording: Recording) -> list[HeadRow]:
    """The heads with most flow, with what they raise and lower where they speak to the answer."""
    strongest = sorted(circuit.heads(), key=lambda node: -abs(node.flow or 0.0))[:SHOWN_HEADS]
    last = len(circuit.prompt.token_ids) - 1
    rows: list[HeadRow] = []
    for node in strongest:
        firing = node.site.firing
        said = (
            moved(recording, firing, k=WORDS) if firing.dest == last and last < recording.lengths[0] else None
        )
        rows.append(
            HeadRow(
                layer=firing.layer,
                head=firing.head,
                dest=firing.dest,
                src=firing.src,
                flow=node.flow or 0.0,
                attention=node.attention or 0.0,
                other_attention=node.other_attention,
                raises=[] if said is None else [named(token) for token, _ in said.promotes],
                lowers=[] if said is None else [named(token) for token, _ in said.suppresses],
                thumbnail=thumbnail(recording, firing.layer, firing.head),
            )
        )
    return rows


def thumbnail(recording: Recording, layer: int, head: int) -> str:
    """A head's attention in few pixels: of several weights within one, the strongest."""
    pattern = recording.patterns[layer, 0, head].float()
    side = min(THUMBNAIL, len(pattern))
    small = adaptive_max_pool2d(pattern[None], side)[0]
    return base64.b64encode((small * 255).round().to(torch.uint8).cpu().numpy().tobytes()).decode()


def _with_mechanism(view: MechanismView, found: Mechanism, stage: Stage) -> MechanismView:
    """The view with the mechanism, and the heads with the steps that they are part of."""
    steps = {head.site.firing: step for step in found.steps for head in step.heads}
    heads = list[HeadRow]()
    for row in view.heads:
        step = steps.get(Firing(row.layer, row.head, row.dest, row.src))
        heads.append(row if step is None else row.model_copy(update={"step": step.id, "role": step.title}))
    drawn = mechanism_data(found) if found.steps else None
    reason = None if found.steps else " ".join(clause.text for clause in found.clauses)
    return view.model_copy(update={"stage": stage, "heads": heads, "mechanism": drawn, "reason": reason})


def _python(model: Model, request: TraceRequest, budget: int) -> str:
    """Lines that find the same mechanism."""
    asked = replace(request, paths="attention", counterfactual=None)
    options = "" if budget == BUDGET else f", budget={budget}"
    if "wrong" in request.about:
        return python_lines(
            asked, model, f"why = headtrace.why(model, {{request}}{options})", "print(why.summary())"
        )
    return python_lines(
        replace(request, counterfactual=None),
        model,
        "circuit = tracer.trace({request})",
        "print(circuit.mechanism().summary())",
    )
