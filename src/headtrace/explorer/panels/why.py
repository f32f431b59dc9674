"""The panel that answers why a head attends here: its channels, the causes of its query and key, and what it moved.

It works on a recording that exists already: the model does not run again.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> prompt = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> firing = FiringRequest(layer=2, head=0, dest=14, src=10)
>>> view = why(session, WhyRequest(recording=session.record(prompt).id, firing=firing))
>>> view.query.explained, view.attention > view.threshold > (view.query.predicted or 0)
(True, True)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field

from headtrace.circuits import ModelInfo
from headtrace.errors import InputError
from headtrace.explorer.panels.prompts import BYTES, answer_label, named, readable
from headtrace.explorer.panels.requests import (
    FiringRequest,
    Position,
    PromptRequest,
    RecordingRequest,
    RootedRequest,
    View,
    python_lines,
)
from headtrace.explorer.panels.session import Session
from headtrace.models.integrity import difference, warn_if_not_compared
from headtrace.roots import LogitDifference
from headtrace.tracing.attribute_root import ReadPoint
from headtrace.tracing.content import moved
from headtrace.vocabulary import AttentionSide, Firing, Kind, head_name

if TYPE_CHECKING:
    from headtrace.interpret import Atlas, HeadRole
    from headtrace.models import Model, Recording
    from headtrace.roots import Root
    from headtrace.tracing.causes import SideCauses


LEAST_SAID = 0.005
"""A logit that changes by less is not worth a word: it would be written as 0.00."""


class WhyRequest(RootedRequest):
    """Why does this head attend here? With a root, also what the head contributed to it there."""

    firing: FiringRequest


class EvidenceView(View):
    """What an atlas or an interpretation says about a channel."""

    words: str
    tokens: list[str] = Field(default_factory=list)
    examples: list[str] = Field(default_factory=list)
    p_value: float | None = None
    supported: bool | None = None


class ChannelBar(View):
    """What one channel contributes to the firing's attention logit."""

    channel: int
    channels: tuple[int, ...] = ()
    """All channels of its group, whose singular values are equal; ``channel`` is the first."""
    term: float
    relative_term: float
    singular_value: float
    in_signal_set: bool
    evidence: EvidenceView | None = None


class CauseView(View):
    """A component without whose signal the head would not attend here."""

    name: str
    kind: Kind
    layer: int | None
    head: int | None
    dest: int | None
    src: int | None
    token: str
    """The token where it acts; for a head, the token it read."""
    channels: list[int]
    weight: float


class SideView(View):
    """One side of a firing."""

    causes: list[CauseView]
    predicted: float | None
    """Attention that would be left without them."""
    explained: bool


class MovedView(View):
    """What the head moved from the source to the destination."""

    norm: float
    """Norm of what it wrote, as a fraction of the norm of the residual stream there."""
    straight: list[tuple[str, float]] = Field(default_factory=list[tuple[str, float]])
    """The answer and the wrong one, each with what the write adds straight to its logit; empty without such a root."""
    promotes: list[tuple[str, float]]
    """Tokens whose logits the write raises most, read directly through the unembedding."""
    suppresses: list[tuple[str, float]]
    contribution: float | None = None
    """Contribution to the root, with attention, norms and gates frozen, in the unit of the root."""
    measure: str | None = None
    """The unit of the contribution."""


class WhyView(View):
    """Why a head attends here."""

    firing: FiringRequest
    sentence: str
    """The answer in a sentence: what it attends to, the strongest cause of either side, what it raises and lowers."""
    attention: float
    threshold: float
    logit: float
    channels: list[ChannelBar]
    remainder: float
    query: SideView
    key: SideView
    moved: MovedView
    python: str


def why(session: Session, request: WhyRequest) -> WhyView:
    """The channels and causes of one firing, what it moved, and what that contributed to a root."""
    recorded = session.clean(request.recording)
    prompt, recording, tracer = recorded.prompt, recorded.recording, session.tracers[recorded.prompt.model]
    firing = request.firing.firing
    (causes,) = tracer.trace_firings(recording, [firing])
    terms = tracer.model.decompose(recording, firing)
    root, subject = None, recording
    if request.has_root:
        resolved = session.resolve(request.trace_request(prompt), prompt.model)
        root, subject = resolved.root, session.subject(recorded, resolved)
    written = moved(subject, firing, root)
    straight = None if root is None else straight_to_answers(subject, firing, root)
    names = () if root is None else _names(tracer.model, root)

    tokens = readable(tracer.model, recording.token_ids[0].tolist())
    channels = [ChannelBar.model_validate(term) for term in terms.top(len(terms.terms))]
    if session.atlas is not None and prompt.model == 0:
        for bar in channels:
            bar.evidence = session.atlas.channel(firing.layer, firing.head, bar.channel)
    view = WhyView(
        firing=request.firing,
        sentence="",
        attention=terms.attention,
        threshold=causes.threshold or 0.0,
        logit=terms.logit,
        channels=channels,
        remainder=terms.remainder,
        query=_side(causes.query, tokens),
        key=_side(causes.key, tokens),
        moved=MovedView(
            norm=written.norm,
            straight=[] if straight is None else list(zip(names, straight, strict=True)),
            promotes=[(named(token), value) for token, value in written.promotes],
            suppresses=[(named(token), value) for token, value in written.suppresses],
            contribution=written.contribution,
            measure=written.measure,
        ),
        python=_python(tracer.model, prompt, request),
    )
    view.sentence = sentence(view, tokens)
    return view


@torch.inference_mode()
def straight_to_answers(recording: Recording, firing: Firing, root: Root) -> tuple[float, float] | None:
    """What a head component adds straight to the answer's logit and to the wrong one's in this run (the mean over
    alternatives): zero at other tokens than that where they are read. None if the root is not of two answers."""
    if not isinstance(root, LogitDifference) or root.wrong is None:
        return None
    if firing.dest != (recording.lengths[0] - 1 if root.position is None else root.position):
        return 0.0, 0.0
    written = recording.write(firing.site.component, 0, firing.dest)
    added = ReadPoint(recording, 0, firing.dest, recording.model.n_layers).logits_of(written[None])[0]
    answer, wrong = (float(added[list(ids)].mean()) for ids in (root.answer, root.wrong))
    return answer, wrong


def _names(model: Model, root: Root) -> tuple[str, str]:
    """What the answer and the wrong one of a root are called."""
    ids: Any = getattr(root, "answer", None) or (), getattr(root, "wrong", None) or ()
    answer, wrong = (", ".join(answer_label(model, id) for id in some) for some in ids)
    return answer, wrong


def sentence(view: WhyView, tokens: Sequence[str]) -> str:
    """What a head does here, and why, in one sentence (two, where it speaks to the answer)."""

    def quoted(text: str) -> str:
        return f"\u201c{text.strip() or text}\u201d"

    def cause(side: SideView, what: str) -> str | None:
        if not side.causes:
            return None
        first = max(side.causes, key=lambda each: (each.kind == "head", each.weight))
        who = {"embedding": "the token itself", "mlp": f"MLP {first.layer}"}.get(first.kind, first.name)
        if first.kind == "head":
            who = f"{head_name(first.layer or 0, first.head or 0)}, which read {quoted(first.token)},"
        # A head is named before MLPs, however small its part.
        most = first.weight >= sum(each.weight for each in side.causes) / 2
        return f"{who} {'set' if most else 'helped to set'} {what}"

    firing = view.firing
    name, dest, src = head_name(firing.layer, firing.head), tokens[firing.dest], tokens[firing.src]
    said = f"{name} at {quoted(dest)} attends to {quoted(src)} with {view.attention:.2f} of its attention"
    if view.attention < view.threshold:
        return f"{said}: less than the {view.threshold:.2f} from which it counts as attending."
    causes = cause(view.query, "what it looks for"), cause(view.key, "what it finds there")
    reasons = [reason for reason in causes if reason is not None]
    said += f" because {' and '.join(reasons)}." if reasons else "."
    if view.moved.straight:
        changes = [
            f"{'raises' if added > 0 else 'lowers'} {quoted(token)} by {abs(added):.2f}"
            for token, added in sorted(view.moved.straight, key=lambda each: -abs(each[1]))
            if abs(added) >= LEAST_SAID
        ]
        return said + (f" In this run it {' and '.join(changes)}, straight at the logits." if changes else "")
    raised, lowered = (
        next((token for token, _ in listed if token != BYTES), None)
        for listed in (view.moved.promotes, view.moved.suppresses)
    )
    if firing.dest == len(tokens) - 1 and raised is not None and lowered is not None:
        said += f" What it writes raises {quoted(raised)} most and lowers {quoted(lowered)} most."
    return said


def _side(side: SideCauses, tokens: tuple[str, ...]) -> SideView:
    causes: list[CauseView] = []
    for cause in side.causes:
        site = cause.site
        read = site.dest if site.src is None else site.src
        view = CauseView(
            name=str(site),
            kind=site.kind,
            layer=site.layer,
            head=site.head,
            dest=site.dest,
            src=site.src,
            token="" if read is None else tokens[read],
            channels=list(cause.channels or ()),
            weight=cause.weight,
        )
        causes.append(view)
    return SideView(causes=causes, predicted=side.predicted, explained=side.explained)


def _python(model: Model, prompt: PromptRequest, request: WhyRequest) -> str:
    place = repr(str(request.firing.firing))
    recorded, root, imports = ["recording = model.record({prompt})"], "", []
    if request.has_root:
        recorded = [
            "resolved = tracer.request({request}).resolve(model)",
            "recording = model.record(resolved.ids, keep=CONTENT_FIELDS)",
        ]
        root, imports = ", resolved.root", ["from headtrace.models.frozen import CONTENT_FIELDS"]
    return python_lines(
        request.trace_request(prompt),
        model,
        *recorded,
        f"why = tracer.explain({{prompt}}, firing={place})",
        f"channels = model.decompose(recording, {place})",
        f"moved = headtrace.tracing.moved(recording, {place}{root})",
        'print(why, channels, moved, sep="\\n\\n")',
        imports=imports,
    )


# -- rather than, and pairs ------------------------------------------------------------------------------------

LISTED = 8
"""Terms of a side, and pairs, that are shown."""


class PairsRequest(RecordingRequest):
    """Why does this head attend here rather than there, and which writers of its query and key met?"""

    firing: FiringRequest
    other: Position | None = None
    """The position of the other source; without one, the score of the firing itself is split into pairs."""


class RatioTermView(View):
    """What one component adds to the logarithm of the ratio of both attentions."""

    name: str
    value: float


class ScorePair(View):
    query: str
    key: str
    value: float
    channels: list[int]


class PairsView(View):
    """Sums over components, each exact: the terms and the rest, the pairs and the remainder."""

    attention: float
    other_attention: float | None
    log_ratio: float | None
    query: list[RatioTermView]
    key: list[RatioTermView]
    query_rest: float
    key_rest: float
    pairs: list[ScorePair]
    total: float
    remainder: float
    python: str


def pairs(session: Session, request: PairsRequest) -> PairsView:
    """One firing against another source of the same head, and the pairs of writers that make the difference."""
    recorded = session.clean(request.recording)
    tracer, firing = session.tracers[recorded.prompt.model], request.firing.firing
    found = tracer.explain_recorded(recorded.recording, firing, rather_than=request.other)
    ratio, listed = found.rather_than, found.pairs(LISTED)
    terms: dict[AttentionSide, list[RatioTermView]] = {"query": [], "key": []}
    rest: dict[AttentionSide, float] = {"query": 0.0, "key": 0.0}
    if ratio is not None:
        for side in terms:
            top = ratio.top(LISTED, side)
            terms[side] = [RatioTermView(name=ratio.place(term), value=term.value) for term in top]
            rest[side] = ratio.log_ratio - sum(term.value for term in top)
    than = "" if request.other is None else f", rather_than={request.other}"
    return PairsView(
        attention=found.attention,
        other_attention=None if ratio is None else ratio.other_attention,
        log_ratio=None if ratio is None else ratio.log_ratio,
        query=terms["query"],
        key=terms["key"],
        query_rest=rest["query"],
        key_rest=rest["key"],
        pairs=[
            ScorePair(
                query=listed.query_name(pair.query),
                key=listed.key_name(pair.key),
                value=pair.value,
                channels=list(pair.largest_channels()),
            )
            for pair in listed.pairs
        ],
        total=listed.total,
        remainder=listed.remainder,
        python=python_lines(
            recorded.prompt.trace_request,
            tracer.model,
            f"why = tracer.explain({{prompt}}, firing={str(firing)!r}{than})",
            f"print(why, why.pairs({LISTED}), sep='\\n\\n')",
        ),
    )


# -- what is known about channels ------------------------------------------------------------------------------

EXAMPLES, TOKENS, CACHED = 3, 8, 4096


class AtlasEvidence:
    """Words for channels, from a folder of ``headtrace atlas`` or ``headtrace interpret`` for the model explored.

    An interpretation has descriptions that were tested; an atlas says what stands out among the pairs with the highest
    scores. A folder may be both: a tested description is then preferred.
    """

    def __init__(self, folder: str | Path, model: Model) -> None:
        from headtrace.interpret import open_atlas

        place = Path(folder)
        interpreted = (place / "interpretation.json").is_file()
        self.words = read_interpretation(place, model) if interpreted else {}
        self.atlas: Atlas | None = None
        self.in_atlas: frozenset[str] = frozenset()
        if (place / "atlas.json").is_file():
            self.atlas = open_atlas(place, model)
            self.in_atlas = frozenset(self.atlas.channels["channel"])
        elif not interpreted:
            raise InputError(
                f"{str(folder)!r} is neither an atlas nor an interpretation: it has no atlas.json and no "
                "interpretation.json. Make one: headtrace atlas MODEL --corpus C --out DIR."
            )
        self.channel = lru_cache(CACHED)(self._channel)

    def roles(self, layer: int, head: int) -> tuple[HeadRole, ...]:
        """What a head does over the corpus of the atlas, as far as that has a name; an interpretation has no roles."""
        return () if self.atlas is None else self.atlas.head(layer, head).roles

    def _channel(self, layer: int, head: int, channel: int) -> EvidenceView | None:
        """What is known about a channel; None where nothing is."""
        found = self.words.get((layer, head, channel))
        named = f"{head_name(layer, head)}:{channel}"
        if found is not None or self.atlas is None or named not in self.in_atlas:
            return found
        entry = self.atlas.channel(layer, head, channel)
        tokens = [each.what for each in entry.tokens][:TOKENS]
        return EvidenceView(
            words=entry.words, tokens=tokens, examples=[pair.excerpt() for pair in entry.top[:EXAMPLES]]
        )


def read_interpretation(folder: Path, model: Model) -> dict[tuple[int, int, int], EvidenceView]:
    """Descriptions by layer, head and channel; where several signals share a channel, the most specific one.

    Those of another model are refused: what its channels stand for says nothing about this one's.
    """
    path = folder / "interpretation.json"
    found: dict[tuple[int, int, int], EvidenceView] = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        settings, signals = dict[str, Any](data.get("settings") or {}), list[dict[str, Any]](data["signals"])
        described = [signal for signal in signals if signal["description"]]
        # Later signals replace earlier ones: those with fewer channels, and supported ones, come last.
        described.sort(key=lambda signal: (-len(signal["channels"]), signal["supported"]))
        for signal in described:
            channels = signal["channels"]
            several = f" (channels {', '.join(map(str, channels))} together)" if len(channels) > 1 else ""
            evidence = EvidenceView(
                words=signal["description"] + several,
                examples=[example["marked"] for example in signal.get("examples", [])][:EXAMPLES],
                p_value=signal["p_value"],
                supported=signal["supported"],
            )
            found |= {(signal["layer"], signal["head"], channel): evidence for channel in channels}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The interpretation {str(folder)!r} cannot be read ({error}). Make it anew: headtrace interpret."
        ) from error
    hashes = (settings.get(name) for name in ("weights_sha256", "computation_sha256"))
    kept = ModelInfo(str(settings.get("model")), None, None, *hashes)
    other = difference(kept, model)
    if other is not None:
        raise InputError(
            f"The interpretation {str(folder)!r} was made of another model than {model.name!r}: {kept.name!r} has "
            f"{other}. Serve the model that it was made of, or interpret this one: headtrace interpret."
        )
    warn_if_not_compared(f"The interpretation {str(folder)!r}", kept)
    return found
