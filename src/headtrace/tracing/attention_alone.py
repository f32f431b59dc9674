"""What a head that attends in part depends on, seen by removing one component at a time from its query or its keys.

ACC++ removes what makes a head attend, until it does not. It says nothing of a head that is below its threshold and
matters all the same, nor of what keeps a head from attending more: one that attends to the first token unless it finds
something else is held down by whatever made it find that. Both are seen by what happens without one component alone:

- without what **holds it down**, the head attends there at least half of what it does not attend now;
- without what **carries** it, it attends less than half as much. That is looked for where ACC++ does not look, in heads
  below the threshold.

The components are the longest writes that the head reads on that side. On the key side a component is removed from all
keys, as everywhere, and must have written at the source about as much as at other keys: what makes other keys compete
is a cause of the attention that they get. A cause has the fewest of its channels that have this effect, those with the
largest attribution first, and as its weight the attention that is lost without them: negative for what holds the head
down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.sparsity import members
from headtrace.tracing.attribute_root import Place
from headtrace.tracing.causes import Cause, PromptSite
from headtrace.tracing.components import Firings
from headtrace.tracing.firing import FiringScores, attention_on
from headtrace.tracing.methods import IG_STEPS
from headtrace.tracing.mlp_causes import HALF, REMOVED_ALONE, longest_writes
from headtrace.tracing.signal_directions import readings_at
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

ABOUT_AS_MUCH = 0.1
"""Of its longest write at any key, what a component has written at least at the source."""
NUMBERS_AT_ONCE = 16_000_000
"""Writes at all keys exist for so many numbers at a time (64 MB in float32)."""


@torch.inference_mode()
def attention_causes_alone(
    recording: Recording, sites: Sequence[PromptSite], unexplained: Sequence[bool]
) -> list[Mapping[AttentionSide, tuple[Cause, ...]]]:
    """For firings of one layer, the components that hold each down on either side; where it is not explained, also
    those that carry it."""
    length = recording.token_ids.shape[1]
    at_once = max(1, NUMBERS_AT_ONCE // (REMOVED_ALONE * length * recording.model.d_model))
    found: list[Mapping[AttentionSide, tuple[Cause, ...]]] = []
    for start in range(0, len(sites), at_once):
        some = slice(start, start + at_once)
        firings = Firings.of(sites[some], recording.model.device)
        scores = FiringScores.of(recording, firings, length, IG_STEPS)
        sides = [list(_causes(scores, side, unexplained[some])) for side in ATTENTION_SIDES]
        found += [dict(zip(ATTENTION_SIDES, both, strict=True)) for both in zip(*sides, strict=True)]
    return found


def _causes(
    scores: FiringScores, side: AttentionSide, unexplained: Sequence[bool]
) -> Iterator[tuple[Cause, ...]]:
    sites, rows = _rows(scores, side)
    clean = scores.attention(scores.logits)
    total = rows.sum(dim=2)
    without = attention_on(scores.logits[:, None] - total, scores.visible, scores.firings.src, scores.cap)
    written = total.abs().amax(dim=-1) > 0
    holds = (without > (1 + clean[:, None]) / 2) & written
    alone = torch.tensor(unexplained, device=clean.device)[:, None]
    carries = (without < HALF * clean[:, None]) & written & alone
    known = torch.cat(
        (clean[:, None], holds.to(clean) + 2 * carries.to(clean)), dim=1
    ).tolist()  # one wait for all
    alone_causes = [
        (f, n, kind != 2) for f, (_, *kinds) in enumerate(known) for n, kind in enumerate(kinds) if kind
    ]
    causes: list[list[Cause]] = [[] for _ in sites]
    if alone_causes:
        of, which, holding = (list(each) for each in zip(*alone_causes, strict=True))
        limits = [(1 + known[f][0]) / 2 if hold else HALF * known[f][0] for f, _, hold in alone_causes]
        fewest = _fewest(scores, of, rows[of, which], limits, holding)
        for (f, n, _), (channels, left) in zip(alone_causes, fewest, strict=True):
            causes[f].append(Cause(sites[f][n], known[f][0] - left, channels, alone=True))
    for mine in causes:
        yield tuple(sorted(mine, key=lambda cause: (-abs(cause.weight), cause.site)))


def _fewest(
    scores: FiringScores,
    of: list[int],
    rows: Float[Tensor, "cause channel token"],
    limits: Sequence[float],
    holding: Sequence[bool],
) -> Iterator[tuple[tuple[int, ...], float]]:
    """For each cause (of the firing ``of``), the fewest groups of channels without which the attention passes its
    limit, largest attribution first, and the attention that is left without them."""
    attributions = torch.einsum("fct, ft -> fc", rows, scores.w[of]).tolist()
    groups = _groups(scores)
    orders = [
        sorted(
            groups[f],
            key=lambda group: ((1 if hold else -1) * sum(own[channel] for channel in group), group[0]),
        )
        for f, own, hold in zip(of, attributions, holding, strict=True)
    ]
    flat = torch.tensor([[c for group in order for c in group] for order in orders], device=rows.device)
    removed = rows.gather(1, flat[..., None].expand_as(rows)).cumsum(dim=1)
    left = attention_on(
        scores.logits[of, None] - removed, scores.visible[of], scores.firings.src[of], scores.cap
    ).tolist()
    for order, after, limit, hold in zip(orders, left, limits, holding, strict=True):
        taken = list[int]()
        for group in order:
            taken += group
            value = after[len(taken) - 1]
            if value > limit if hold else value < limit:
                break
        yield tuple(sorted(taken)), after[len(taken) - 1]


def _groups(scores: FiringScores) -> list[list[list[int]]]:
    """The channels of each firing's head, those of equal singular values together."""
    n, n_channels = len(scores.firings.sites), scores.a.shape[-1]
    if scores.first is None:
        return [[[channel] for channel in range(n_channels)]] * n
    return [
        [group for mine in inside if (group := [channel for channel in mine if channel >= 0])]
        for inside in members(scores.first).tolist()
    ]


def _rows(
    scores: FiringScores, side: AttentionSide
) -> tuple[list[list[Site]], Float[Tensor, "firing n channel token"]]:
    """The longest writes that each firing reads on one side, and what each adds to every logit through every channel;
    nothing for those that are not written there."""
    recording, firings, length = scores.recording, scores.firings, scores.logits.shape[1]
    layer = firings.sites[0][1].layer or 0
    places = [
        Place(prompt, int((site.dest if side == "query" else site.src) or 0), layer)
        for prompt, site in firings.sites
    ]
    sizes, numbers, index = longest_writes(recording, places, REMOVED_ALONE)
    sites = [
        [index.component(number).at(place.position) for number in mine]
        for place, mine in zip(places, numbers.tolist(), strict=True)
    ]
    written = sizes > 0
    if side == "query":
        writes = [recording.writes(mine, p.prompt) for mine, p in zip(sites, places, strict=True)]
        own = torch.stack(writes) @ readings_at(recording, firings.sites, "query")
        rows = own[..., None] * scores.b.mT[:, None]
    else:
        weights, kv = recording.model.weights, firings.head // recording.model.weights.group
        writes = torch.zeros(*numbers.shape, length, recording.model.d_model).to(scores.logits)
        for f, (mine, place) in enumerate(zip(sites, places, strict=True)):
            for n, site in enumerate(mine):
                own = recording.write(site.component, place.prompt)
                writes[f, n, : len(own)] = own
        lengths = writes.norm(dim=-1) * scores.visible[:, None]
        written &= sizes >= ABOUT_AS_MUCH * lengths.amax(dim=-1)
        inverse = 1 / recording.norm_scales[layer, firings.prompt, :length]
        if recording.key_scales is not None:
            inverse = inverse / recording.key_scales[layer, firings.prompt, kv, :length]
        keys = scores.rotary.rotate(writes @ weights.W_K[layer, kv][:, None], inverse)
        rows = ((keys @ scores.to_key[:, None]) * scores.a[:, None, None]).mT
    return sites, rows * scores.scale * written[..., None, None]
