"""A recorded prompt: its tokens, its answers, and every head's attention.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> asked = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> recording = record(model, asked)
>>> view = record_view(model, recording, 0, asked)
>>> view.answers[0].token, len(view.heads), len(pattern_bytes(recording)) == 3 * 4 * 15 * 16 // 2
('Mary', 12, True)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headtrace.errors import InputError
from headtrace.explorer.server.schemas import (
    Answer,
    HeadMeasures,
    HeadPattern,
    Intervention,
    PromptRequest,
    RecordingView,
)
from headtrace.explorer.views import snippets
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

ANSWERS = 10
"""So many of the likeliest next tokens are shown."""


def token_ids(model: Model, prompt: PromptRequest) -> list[int]:
    """The tokens of a prompt, checked against the vocabulary and the context."""
    return model.to_ids(given(prompt), bos=prompt.bos)


def given(prompt: PromptRequest) -> str | list[int]:
    """A prompt as the library takes it."""
    return prompt.token_ids if prompt.text is None else prompt.text  # type: ignore[return-value]


def record(model: Model, prompt: PromptRequest) -> Recording:
    """One forward pass that keeps what all views of the prompt need."""
    return model.record([token_ids(model, prompt)], last_logits=True, keep=CONTENT_FIELDS, patterns="keep")


def recording_id(index: int, ids: Sequence[int], interventions: Sequence[Intervention] = ()) -> str:
    """By what a recording is known: the model, the tokens, and what was changed.

    >>> recording_id(0, [5, 7]) == recording_id(0, (5, 7)), recording_id(0, [5, 7]) == recording_id(1, [5, 7])
    (True, False)
    """
    changes = [change.model_dump(mode="json") for change in interventions]
    told = json.dumps([index, list(ids), changes])
    return hashlib.sha256(told.encode()).hexdigest()[:20]


def record_view(
    model: Model,
    recording: Recording,
    index: int,
    prompt: PromptRequest | None = None,
    interventions: Sequence[Intervention] = (),
    python: str | None = None,
) -> RecordingView:
    """What there is to see of a recorded prompt, of the model with this number; ``python`` if not that of a plain
    recording."""
    ids = recording.token_ids[0].tolist()
    prompt = PromptRequest(token_ids=ids, model=index) if prompt is None else prompt
    return RecordingView(
        id=recording_id(index, ids, interventions),
        model=index,
        text=prompt.text,
        tokens=list(recording.tokens()),
        token_ids=ids,
        answers=[
            Answer(token=token, id=number, probability=probability)
            for token, number, probability in recording.top_answers(min(ANSWERS, model.d_vocab))
        ],
        heads=head_measures(recording),
        python=snippets.record_lines(model, prompt) if python is None else python,
    )


def head_measures(recording: Recording) -> list[HeadMeasures]:
    """Every head of a recorded prompt, layer by layer."""
    patterns = recording.patterns[:, 0]
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


def pattern_bytes(recording: Recording) -> bytes:
    """All attention of a recorded prompt, one byte per weight (255: all of it), in the order of layers, heads,
    destinations and their sources 0 to dest."""
    patterns = recording.patterns[:, 0]
    dest, src = torch.tril_indices(*patterns.shape[-2:], device=patterns.device)
    return (patterns[..., dest, src] * 255).round_().to(torch.uint8).cpu().numpy().tobytes()


def head_pattern(recording: Recording, layer: int, head: int) -> HeadPattern:
    """One head's attention, exactly."""
    model = recording.model
    if not (0 <= layer < model.n_layers and 0 <= head < model.n_heads):
        raise InputError(
            f"There is no head {head_name(layer, head)} in {model.name!r}: it has layers 0 to {model.n_layers - 1} and "
            f"heads 0 to {model.n_heads - 1}."
        )
    rows = recording.patterns[layer, 0, head].tolist()
    attention = [row[: dest + 1] for dest, row in enumerate(rows)]
    return HeadPattern(layer=layer, head=head, attention=attention)
