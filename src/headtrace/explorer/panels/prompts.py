"""The first panel: a prompt, its tokens, the model's answers and every head's attention; and prompts to begin with.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> view = record(session, PromptRequest(text="When Mary and John went to the store, John gave a drink to"))
>>> view.answers[0].token, len(view.heads), len(pattern_bytes(session, view.id)) == 3 * 4 * 15 * 16 // 2
('Mary', 12, True)
>>> examples(session, "ioi", count=1)[0].answer
' Heather'

``starter`` is a prompt to begin with: of a task, an example that the model answers rightly. Up to twenty examples of a
task run in one batch, and the one whose right answer is likeliest is kept, in the cache too: the next server of this
model has it without running anything.

>>> found = starter(session, "ioi")
>>> found.right, found.probability > 0.5
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.panels.requests import PromptRequest, View, python_lines
from headtrace.explorer.panels.session import Session
from headtrace.prompts.encoding import UNREADABLE, spelled
from headtrace.tasks import TASKS, load_task
from headtrace.vocabulary import head_name
from headtrace.writing import cache_folder, write_text

if TYPE_CHECKING:
    from headtrace.explorer.panels.session import RecordedPrompt
    from headtrace.models import Model, Recording
    from headtrace.roots import Root


ANSWERS = 10
"""How many of the likeliest next tokens are shown."""
BYTES = "(bytes)"
"""In the place of a token that is a piece of a character."""


class Answer(View):
    """A next token."""

    token: str
    id: int
    probability: float


class HeadMeasures(View):
    """One head on this prompt."""

    layer: int
    head: int
    sink: float
    """Mean attention to the first token, over all destinations after it."""
    entropy: float
    """Mean entropy of attention in bits, over all destinations after the first."""
    previous: float
    """Mean attention to the token before."""
    strongest: tuple[int, int, float]
    """Destination, source and attention where it attends most, past the first token if the prompt has more."""


class RecordingView(View):
    """A recorded prompt. Its patterns are at ``/api/recordings/{id}/patterns``: one byte per attention weight
    (255: all of it), layer by layer, head by head, destination by destination, each with its sources 0 to dest."""

    id: str
    model: int
    text: str | None
    tokens: list[str]
    token_ids: list[int]
    answers: list[Answer]
    heads: list[HeadMeasures]
    python: str


class HeadPattern(View):
    """All attention of one head: per destination, its sources 0 to dest."""

    layer: int
    head: int
    attention: list[list[float]]


def record(session: Session, prompt: PromptRequest) -> RecordingView:
    """Record a prompt, and show its tokens, answers and heads."""
    return recording_view(session.record(prompt))


def recording_view(recorded: RecordedPrompt, python: str | None = None) -> RecordingView:
    """A recording as it is shown; ``python`` replaces the lines of a recording without interventions."""
    recording, prompt = recorded.recording, recorded.prompt
    model = recording.model
    shown = min(ANSWERS, model.d_output)
    if python is None:
        lines = ("recording = model.record({prompt})", f"print(recording.top_answers({shown}))")
        python = python_lines(prompt.trace_request, model, *lines)
    return RecordingView(
        id=recorded.id,
        model=prompt.model,
        text=prompt.text,
        tokens=list(readable(model, recording.token_ids[0].tolist())),
        token_ids=recording.token_ids[0].tolist(),
        answers=[
            answer_view(model, number, probability) for _, number, probability in recording.top_answers(shown)
        ],
        heads=head_measures(recording),
        python=python,
    )


def readable(model: Model, ids: Sequence[int]) -> tuple[str, ...]:
    """The tokens of a prompt for people: pieces of characters are named by the character they belong to."""
    return model.token_labels(ids) if model.tokenizer is None else spelled(model.tokenizer, ids)


def named(label: str) -> str:
    """The label of a token that a head raises or lowers; of a piece of a character there is nothing to read."""
    return BYTES if UNREADABLE in label else label


def answer_view(model: Model, token: int, probability: float) -> Answer:
    """An answer for people."""
    return Answer(token=answer_label(model, token), id=token, probability=probability)


def answer_label(model: Model, token: int) -> str:
    """The text of an answer; of a piece of a character, of which the rest is not there, its bytes."""
    (label,) = model.output_labels([token])
    return readable(model, [token])[0] if UNREADABLE in label else label


def spelled_root(model: Model, root: Root) -> Root:
    """A root whose answers are named as `answer_view` names them."""
    said: dict[str, tuple[str, ...]] = {}
    for name in ("answer", "wrong"):
        tokens: tuple[str, ...] = getattr(root, f"{name}_tokens", None) or ()
        if any(UNREADABLE in token for token in tokens):
            said[f"{name}_tokens"] = tuple(answer_label(model, id) for id in getattr(root, name))
    return replace(root, **said)


def head_measures(recording: Recording) -> list[HeadMeasures]:
    """Measures of every head, layer by layer."""
    patterns = recording.patterns[:, 0]  # layer head dest src
    rows = patterns[:, :, 1:] if patterns.shape[-1] > 1 else patterns
    sink = rows[..., 0].mean(-1).tolist()
    entropy = (torch.special.entr(rows).sum(-1).mean(-1) / math.log(2)).tolist()
    before = patterns.diagonal(offset=-1, dim1=-2, dim2=-1)
    previous = (before.mean(-1) if before.shape[-1] else before.sum(-1)).tolist()
    return [
        HeadMeasures(
            layer=f.layer,
            head=f.head,
            sink=sink[f.layer][f.head],
            entropy=entropy[f.layer][f.head],
            previous=previous[f.layer][f.head],
            strongest=(f.dest, f.src, attention),
        )
        for f, attention in recording.strongest_firings()
    ]


def pattern_bytes(session: Session, id: str) -> bytes:
    """All attention of a recording, one byte per weight, in the order that `RecordingView` describes."""
    patterns = session.recorded(id).recording.patterns[:, 0]
    dest, src = torch.tril_indices(*patterns.shape[-2:], device=patterns.device)
    return (patterns[..., dest, src] * 255).round_().to(torch.uint8).cpu().numpy().tobytes()


def head_pattern(session: Session, id: str, layer: int, head: int) -> HeadPattern:
    """One head's attention, exactly."""
    recording = session.recorded(id).recording
    model = recording.model
    if not (0 <= layer < model.n_layers and 0 <= head < model.n_heads):
        raise InputError(
            f"There is no head {head_name(layer, head)} in {model.name!r}: it has layers 0 to {model.n_layers - 1} and "
            f"heads 0 to {model.n_heads - 1}."
        )
    rows = recording.patterns[layer, 0, head].tolist()
    attention = [row[: dest + 1] for dest, row in enumerate(rows)]
    return HeadPattern(layer=layer, head=head, attention=attention)


# -- what is served, and prompts to begin with -----------------------------------------------------------------


class TaskView(View):
    name: str
    description: str


class ServedModel(View):
    name: str
    architecture: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int


class ServerView(View):
    """What is served, and within which limits."""

    version: str
    models: list[ServedModel]
    tasks: list[TaskView]
    atlas: bool
    run: bool
    max_tokens: int
    max_waiting: int


class ExampleView(View):
    """A prompt of a task with its answers."""

    text: str
    answer: str
    wrong: str | None
    counterfactual: str | None


def server_view(session: Session) -> ServerView:
    """The models, tasks and limits of a session."""
    return ServerView(
        version=headtrace.__version__,
        models=[
            ServedModel(
                name=model.name,
                architecture=model.architecture.name,
                n_layers=model.n_layers,
                n_heads=model.n_heads,
                d_model=model.d_model,
                d_head=model.d_head,
            )
            for model in session.models
        ],
        tasks=[TaskView(name=task.name, description=task.summary) for task in TASKS.values()],
        atlas=session.atlas is not None,
        run=session.has_run,
        max_tokens=session.settings.max_tokens,
        max_waiting=session.settings.max_waiting,
    )


def examples(session: Session, name: str, count: int = 10, seed: int = 0) -> list[ExampleView]:
    """Examples of a task, about equally many of each of its cells.

    Only built-in tasks: ``load_task`` also reads files, which a browser must not make it do.
    """
    if name not in TASKS:
        raise InputError(f"There is no task {name!r}. Use one of {', '.join(TASKS)}.")
    if count < 1:
        raise InputError(f"count={count}: expected at least 1 example.")
    task, tokenizer = TASKS[name], session.models[0].tokenizer
    per_cell = min(-(-count // task.n_cells), task.n_per_cell)
    views: list[ExampleView] = []
    for example in load_task(name, tokenizer, n_per_cell=per_cell, seed=seed).spread(count):
        other = task.counterfactual(example, tokenizer, seed=seed)
        views.append(
            ExampleView(
                text=example.text,
                answer=example.answer,
                wrong=example.wrong,
                counterfactual=None if other is None else other.text,
            )
        )
    return views


CHECKED = 20
"""Examples of a task that are tried."""


class StarterView(ExampleView):
    """An example of a task, and how the model answers it."""

    task: str
    probability: float
    """Of the task's answer."""
    right: bool
    """Whether that is what the model answers; of some tasks a model gets no example right."""


def starter(session: Session, name: str) -> StarterView:
    """The example of a task that the model answers rightly with the highest probability."""
    model = session.models[0]
    if model.tokenizer is None:
        raise InputError(
            f"{model.name!r} was loaded without a tokenizer: it cannot read the examples of a task."
        )
    path = cache_folder("starters") / f"{model.weights_sha256}-{model.computation_sha256}-{name}.json"
    with suppress(OSError, ValidationError):
        return StarterView.model_validate_json(path.read_bytes())
    tried: list[tuple[ExampleView, int]] = []
    for example in examples(session, name, CHECKED):
        with suppress(InputError):  # an answer that this model spells in another way
            tried.append((example, model.token_id(example.answer, prompt=example.text)))
    if not tried:
        raise InputError(f"No example of {name!r} has an answer of one token in {model.name!r}.")
    probabilities = model.end_logits([example.text for example, _ in tried]).softmax(-1)
    found = [
        StarterView(
            **example.model_dump(),
            task=name,
            probability=float(row[answer]),
            right=int(row.argmax()) == answer,
        )
        for (example, answer), row in zip(tried, probabilities, strict=True)
    ]
    best = max(found, key=lambda each: (each.right, each.probability))
    with suppress(OSError):
        write_text(path, best.model_dump_json())
    return best
