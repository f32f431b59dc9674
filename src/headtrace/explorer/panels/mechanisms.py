"""The first panel of a prompt: why this answer? What matters in the prompt, the heads that matter, the mechanism.

The work comes in parts, each of which is shown as soon as it is there: the heads that contribute most in this run; then
the words, with what exchanging them did, and the heads with most flow; then the mechanism; then what was measured of
each of its steps.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> recorded = session.record(PromptRequest(text="When Mary and John went to the store, John gave a drink to"))
>>> question(session, QuestionRequest(recording=recorded.id)).wrong.token
'John'
>>> stages = []
>>> view, _ = explain(session, QuestionRequest(recording=recorded.id), partial=lambda view: stages.append(view.stage))
>>> stages, view.stage, view.words[0].text
(['run', 'heads', 'cards'], 'badges', 'When')
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from headtrace.causal.importance import WordImportance
from headtrace.errors import InputError
from headtrace.explorer.page import mechanism_data
from headtrace.explorer.panels.prompts import Answer, answer_view, named, readable, spelled_root
from headtrace.explorer.panels.requests import Answers, PromptRequest, RecordingRequest, View, python_lines
from headtrace.explorer.panels.session import RecordedPrompt, Session
from headtrace.explorer.panels.why import straight_to_answers
from headtrace.mechanism.asking import tell
from headtrace.mechanism.evidence import measure_steps
from headtrace.mechanism.rules import RULES, TOP_RAISED, Facts, role
from headtrace.progress import scaled
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.roots import Likelihood, LogitDifference
from headtrace.tracing.attribute_root import attribute_root
from headtrace.tracing.content import Content, moved
from headtrace.tracing.measured_replacements import BUDGET
from headtrace.tracing.methods import IG_STEPS
from headtrace.tracing.prompt_words import ask
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.circuits import Edge
    from headtrace.mechanism import Mechanism
    from headtrace.mechanism.parts import Step
    from headtrace.models import Model, Recording
    from headtrace.progress import Progress
    from headtrace.roots import Root
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

Stage = Literal["run", "heads", "cards", "badges"]
"""What is there: heads by what they contribute in this run; words, and heads by flow; the mechanism; measurements."""

BESIDE_HEADS = 840
"""Width of the drawing in pixels: three cards, so that its text is not made smaller beside the list of heads."""


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


class RoleView(View):
    """A role of a head over a corpus (`headtrace.interpret.head_roles`)."""

    name: str
    score: float
    chance: float


class HeadRow(View):
    """A head component that matters: what of the answer flows through what it read and wrote here."""

    layer: int
    head: int
    dest: int
    src: int
    flow: float
    """In the unit of the metric; at the first stage, what it contributes in this run."""
    attention: float
    other_attention: float | None = None
    raises: list[str]
    lowers: list[str]
    straight: float | None = None
    """Of the flow, what goes straight to the answer, through no later layer; null where that is not known yet."""
    logits: tuple[float, float] | None = None
    """Of that, what goes into the answer's logit and into the rival's: the first minus the second."""
    step: int | None = None
    """The step of the mechanism that it is part of."""
    role: str
    """What it does in this prompt, in words: its step, or what the rules of steps call it alone."""
    measured: list[RoleView] = Field(default_factory=list[RoleView])
    """What it does over the corpus of the atlas that is served."""
    thumbnail: str
    """Its attention as a square of bytes (255: all of it), in base64."""


class MechanismView(View):
    """Why the model answers as it does, as far as it is computed."""

    stage: Stage
    measure: str
    answer: str
    wrong: str | None
    heads: list[HeadRow]
    python: str
    value: float | None = None
    """The metric on the prompt."""
    importance: list[float | None] = Field(default_factory=list[float | None])
    """By token, the mean loss where its word is exchanged; null where it was not."""
    words: list[WordView] = Field(default_factory=list[WordView])
    tried: int = 0
    """Changed prompts that were run."""
    mechanism: dict[str, Any] | None = None
    """For the drawing (`headtrace.explorer.page.mechanism_data`)."""
    reason: str | None = None
    """Why there is nothing to draw, where there is not."""


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
    root: Any = spelled_root(tracer.model, asked.root)
    subject = session.subject(recorded, asked)
    view = MechanismView(
        stage="run",
        measure=root.measure,
        answer="".join(root.answer_tokens or ()),
        wrong="".join(getattr(root, "wrong_tokens", None) or ()) or None,
        heads=[
            head_row(session, recorded, root, *each)
            for each in contributing(subject, root)
            if each[0].dest < recorded.recording.lengths[0]  # not within an answer of several tokens
        ],
        python=_python(tracer.model, asked.request, budget),
    )
    if partial is not None:
        partial(view)
    compared = tracer.compare(asked, scaled(progress, 0, 60, 100), budget=budget)
    # Pieces of characters are spelled for people: in the drawing, the steps and the sentence.
    circuit = compared.circuit
    labels = readable(tracer.model, circuit.prompt.token_ids)
    circuit = replace(
        circuit,
        prompt=replace(circuit.prompt, tokens=labels),
        root=spelled_root(tracer.model, circuit.root),
    )
    compared = replace(compared, circuit=circuit)
    view = _with_flows(session, view, recorded, compared)
    if partial is not None:
        partial(view)
    found = tell(tracer, compared, measure=False, progress=scaled(progress, 60, 20, 100))
    view = _with_mechanism(view, found, "cards")
    if not found.steps:
        return view.model_copy(update={"stage": "badges"}), found

    def measured(steps: tuple[Step, ...]) -> None:
        if partial is not None:
            partial(_with_mechanism(view, replace(found, steps=steps), "cards"))

    measured(found.steps)
    steps, test = measure_steps(compared.flows, found.steps, 0, scaled(progress, 80, 20, 100), measured)
    found = replace(found, steps=steps, test=test)
    return _with_mechanism(view, found, "badges"), found


@torch.inference_mode()
def contributing(recording: Recording, root: Root) -> list[tuple[Firing, float, float]]:
    """The head components that contribute most to a root in this run (attention, norms and gates frozen), with their
    attention. What they read at the first token is left out: constants, mostly."""
    swept = Content.of(recording, [attribute_root(root, recording, 0, IG_STEPS).parts]).gradients
    values: list[Tensor] = []
    places: list[Tensor] = []
    for layer in range(recording.model.n_layers):
        given = swept.heads(layer)[0]  # head dest src
        given[..., 0] = 0.0
        best = given.abs().flatten().topk(min(SHOWN_HEADS, given.numel())).indices
        values.append(given.flatten()[best])
        head, dest, src = torch.unravel_index(best, given.shape)
        places.append(torch.stack((torch.full_like(head, layer), head, dest, src), -1))
    every, where = torch.cat(values), torch.cat(places)
    strongest = every.abs().topk(min(SHOWN_HEADS, len(every))).indices
    firings = [Firing(*place) for place in where[strongest].tolist()]
    return [
        (f, value, float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src)))
        for f, value in zip(firings, every[strongest].tolist(), strict=True)
    ]


def head_row(
    session: Session,
    recorded: RecordedPrompt,
    root: Root,
    firing: Firing,
    flow: float,
    attention: float,
    other: float | None = None,
    direct: Edge | None = None,
    whole: float = 1.0,
) -> HeadRow:
    """A head for the list: what it does, what it raises and lowers where it speaks to the answer, and its picture.

    ``direct`` is its edge into the root of a difference circuit, and ``whole`` what the circuit explains; without
    ``other``, the attention in changed prompts, it is a row of this run alone.
    """
    recording, model = recorded.recording, recorded.prompt.model
    said = moved(recording, firing, k=TOP_RAISED) if firing.dest == recording.lengths[0] - 1 else None
    if other is None:
        logits = straight_to_answers(recording, firing, root)
        straight = None if logits is None else logits[0] - logits[1]
    else:
        straight, logits = (0.0, None) if direct is None else (direct.weight, direct.logits)
    raises = [] if said is None else [named(token) for token, _ in said.promotes]
    facts = Facts(
        readable(recording.model, recording.token_ids[0].tolist()),
        firing.dest,
        firing.src,
        flow,
        whole,
        0.0 if direct is None else direct.weight,
        None if direct is None else direct.logits,
        tuple(raises),
        tuple(getattr(root, "answer_tokens", None) or ()),
        tuple(getattr(root, "wrong_tokens", None) or ()),
        attention=attention,
        other_attention=other,
    )
    known = [] if session.atlas is None or model else session.atlas.roles(firing.layer, firing.head)
    return HeadRow(
        **asdict(firing),
        flow=flow,
        attention=attention,
        other_attention=other,
        raises=raises[:WORDS],
        lowers=[] if said is None else [named(token) for token, _ in said.suppresses][:WORDS],
        straight=straight,
        logits=logits,
        role=RULES[role(facts)].words(facts),
        measured=[RoleView.model_validate(each) for each in known],
        thumbnail=thumbnail(recording, firing.layer, firing.head),
    )


def _with_flows(
    session: Session, view: MechanismView, recorded: RecordedPrompt, compared: PromptComparison
) -> MechanismView:
    """The view with what comparing changed prompts gives: words and heads by what they carry."""
    circuit, measured = compared.circuit, compared.measured
    assert measured is not None
    assert circuit.difference is not None
    own = [WordImportance.of(word, found) for word in measured.words if (found := measured.of(word))]
    words = [WordView.model_validate(word) for word in own]
    for word in words:
        word.changes = sorted(word.changes, key=lambda change: (not change.flips, -abs(change.effect)))[
            :SUGGESTED
        ]
    length = recorded.recording.lengths[0]
    strongest = sorted(circuit.heads(), key=lambda node: -abs(node.flow or 0.0))
    shown = [
        node for node in strongest if (node.dest or 0) < length
    ]  # not within an answer of several tokens
    direct = {edge.source: edge for edge in circuit.edges if edge.side == "root"}
    rows = [
        head_row(
            session,
            recorded,
            circuit.root,
            node.site.firing,
            node.flow or 0.0,
            node.attention or 0.0,
            node.other_attention,
            direct.get(node.id),
            circuit.difference.change,
        )
        for node in shown[:SHOWN_HEADS]
    ]
    return view.model_copy(
        update={
            "stage": "heads",
            "value": circuit.difference.value,
            "importance": list(measured.by_token(len(circuit.prompt.token_ids)))[:length],
            "words": words,
            "tried": len(measured.changes),
            "heads": rows,
            "reason": circuit.reason,
        }
    )


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
    drawn = mechanism_data(found, BESIDE_HEADS) if found.steps else None
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
