"""ACC and SVT, the two earlier methods.

ACC divides relative attention: the logit on the source less the mean logit of the other visible keys. It is linear, so
it divides exactly over channels and components; each step keeps the smallest prefix (largest first) that reaches the
total. Channels of equal singular values are one (`headtrace.channels.sparsity`), here and in SVT.

SVT, singular vector tracing (the 2024 paper), finds upstream heads by what they write into a firing's signal channels.
A head fires when it puts more than half of its attention on one source; the first token is skipped. With
``channels="all"`` the trace ignores the SVD filter, which is the paper's negative control.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels import signal_set
from headtrace.channels.sparsity import along_own, summed
from headtrace.measures import relative_row
from headtrace.tracing.attribute_root import carries_nothing
from headtrace.tracing.causes import Cause, Causes, SideCauses
from headtrace.tracing.components import Firings, Upstream
from headtrace.tracing.firing import (
    Candidates,
    FiringScores,
    KeyCandidates,
    QueryCandidates,
    attention_on,
    in_chunks,
)
from headtrace.tracing.readings import Composer
from headtrace.vocabulary import Site

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.methods import ACC, SVT, Method

SHARE = 0.7
"""SVT: upstream heads are kept until they reach this share of all contributions."""


def smallest_prefix(
    terms: Float[Tensor, "firing n"],
    target: Float[Tensor, " firing"],
    size: Float[Tensor, " firing"] | None = None,
) -> Bool[Tensor, "firing n"]:
    """Largest terms first, as few as reach the target but for rounding; none that is of the size of rounding itself.

    ``size`` is the size of what the terms are parts of, where that is more than they are together.
    """
    values, order = terms.sort(dim=-1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(values[:, :1]), values.cumsum(-1)[:, :-1]), dim=-1)
    whole = terms.abs().sum(-1) if size is None else torch.maximum(size, terms.abs().sum(-1))
    rounding = carries_nothing(terms.dtype) * whole[:, None]
    keep = (before < target[:, None] - rounding) & (values > rounding)
    return torch.zeros_like(keep).scatter(1, order, keep)


def _of_groups(
    choose: Callable[[Tensor], Tensor],
    terms: Float[Tensor, "firing channel"],
    first: Int[Tensor, "firing channel"] | None,
) -> Bool[Tensor, "firing channel"]:
    """Channels that are chosen by their terms: a group of equal singular values as one, with all its channels."""
    return choose(terms) if first is None else choose(summed(terms, first)).gather(-1, first)


def _causes(
    method: Method,
    scores: FiringScores,
    query: list[SideCauses],
    key: list[SideCauses],
    rounding: list[float] | list[None],
) -> list[Causes]:
    """Both sides of each firing put together."""
    clean, keys = scores.attention(scores.logits).tolist(), scores.visible.sum(-1).tolist()
    return [
        Causes(
            prompt,
            site,
            {"query": query[f], "key": key[f]},
            clean[f],
            method.threshold(keys[f]),
            rounding[f],
        )
        for f, (prompt, site) in enumerate(scores.firings.sites)
    ]


@torch.inference_mode()
def trace_acc(method: ACC, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
    """Causes of many firings by ACC."""
    return in_chunks(recording, firings, composer, lambda some, upstream: _acc_chunk(method, some, upstream))


def _acc_chunk(method: ACC, firings: Firings, upstream: Upstream) -> list[Causes]:
    scores = FiringScores.of(upstream.recording, firings, upstream.length, 1)
    scores = replace(scores, w=relative_row(scores.visible, firings.src, scores.logits.dtype))
    terms = scores.a * (scores.w[:, None] @ scores.b)[:, 0] * scores.scale
    subspace = _of_groups(lambda each: smallest_prefix(each, each.sum(-1)), terms, scores.first)
    query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
    scores.require(query, key)
    return _causes(
        method,
        scores,
        _acc_side(query, subspace, firings.dest),
        _acc_side(key, subspace, firings.src),
        scores.rounding(query, key),
    )


def _acc_side(
    candidates: Candidates,
    subspace: Bool[Tensor, "firing channel"],
    position: Int[Tensor, " firing"],
) -> list[SideCauses]:
    """Smallest prefix of components that reaches the total inside the subspace; nothing for a negative total."""
    scores, index = candidates.scores, candidates.index
    inside = (candidates.attributions() * subspace[:, None]).sum(-1)
    total, clean = inside.sum(-1), scores.attention(scores.logits).tolist()
    chosen = smallest_prefix(inside, total)
    sides: list[SideCauses] = []
    for f, (_, site) in enumerate(scores.firings.sites):
        channels, numbers = subspace[f].nonzero()[:, 0], chosen[f].nonzero()[:, 0]
        if float(total[f]) <= 0 or not numbers.numel():
            sides.append(SideCauses((), clean[f], False))
            continue
        causes = [
            Cause(index.component(number, site).at(int(position[f])), weight, tuple(channels.tolist()))
            for number, weight in zip(numbers.tolist(), inside[f, numbers].tolist(), strict=True)
        ]
        causes.sort(key=lambda cause: -cause.weight)
        # The attention that is left without these components' signals in these channels.
        which = torch.tensor([f], device=numbers.device)
        flat = (numbers[:, None] * scores.a.shape[-1] + channels).flatten()
        left = scores.logits[which] - candidates.rows(which, flat[None]).sum(dim=1)
        predicted = attention_on(left, scores.visible[which], scores.firings.src[which], scores.cap)
        sides.append(SideCauses(tuple(causes), float(predicted), True))
    return sides


@torch.inference_mode()
def trace_svt(method: SVT, recording: Recording, firings: Firings, composer: Composer) -> list[Causes]:
    """Causes of many firings by SVT."""
    return in_chunks(recording, firings, composer, lambda some, upstream: _svt_chunk(method, some, upstream))


def _svt_chunk(method: SVT, firings: Firings, upstream: Upstream) -> list[Causes]:
    recording = upstream.recording
    scores = FiringScores.of(recording, firings, upstream.length, 1)
    b = scores.b[torch.arange(len(firings), device=firings.src.device), firings.src]
    terms = scores.a * b * scores.scale
    inside = torch.ones_like(terms, dtype=torch.bool)
    if method.channels == "signal":
        rounding = carries_nothing(terms.dtype) * terms.abs().sum(-1, keepdim=True)
        inside = _of_groups(lambda each: signal_set(each) & (each.abs() > rounding), terms, scores.first)
    query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
    scores.require(query, key)
    # The papers' sqrt(sigma_k) u_k . o and sqrt(sigma_k) v_k . o, signed so that the token's own are positive.
    root = recording.model.channels.at(firings.layer, firings.head).singular_values.sqrt()
    own_a, own_b = along_own(scores.a, scores.first), along_own(b, scores.first)
    for_query = own_a / root.clamp_min(torch.finfo(root.dtype).tiny) * inside
    for_key = own_b * root * inside
    by_query, by_key = query.by_head() @ for_query[..., None], key.by_head() @ for_key[..., None]
    return _causes(
        method,
        scores,
        _svt_side(recording, firings, firings.dest, by_query[..., 0], inside, (scores.a * for_query).sum(-1)),
        _svt_side(recording, firings, firings.src, by_key[..., 0], inside, (b * for_key).sum(-1)),
        scores.rounding(query, key),
    )


def _svt_side(
    recording: Recording,
    firings: Firings,
    position: Int[Tensor, " firing"],
    contributions: Float[Tensor, "firing head_up"],
    inside: Bool[Tensor, "firing channel"],
    whole: Float[Tensor, " firing"],
) -> list[SideCauses]:
    """The smallest set of upstream heads that reaches 70% of the summed contributions; ``whole`` is what the token
    itself has, of which heads may have written next to nothing."""
    chosen = smallest_prefix(contributions, SHARE * contributions.sum(-1), whole)
    sides: list[SideCauses] = []
    for f, ((prompt, _), t) in enumerate(zip(firings.sites, position.tolist(), strict=True)):
        channels = tuple(inside[f].nonzero()[:, 0].tolist())
        causes: list[Cause] = []
        for number in chosen[f].nonzero()[:, 0].tolist():
            layer, head = divmod(number, recording.model.n_heads)
            src = int(recording.attention.row(layer, prompt, head, t)[: t + 1].argmax())
            weight = float(contributions[f, number])
            causes.append(Cause(Site("head", layer, head, t, src), weight, channels))
        causes.sort(key=lambda cause: -cause.weight)
        sides.append(SideCauses(tuple(causes), None, bool(causes)))
    return sides
