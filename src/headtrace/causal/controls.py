"""Components to compare a circuit's with: as many of the same layers, at random or of about the same attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from headtrace.vocabulary import Site

if TYPE_CHECKING:
    from headtrace.models import Recording


def random_like(recording: Recording, site: Site, generator: torch.Generator) -> Site:
    """A firing of the same layer that is somewhere else: any head, any destination, any key it sees."""
    layer: Any = site.layer
    places = recording.visible[layer][0].nonzero()
    dest, src = places[int(torch.randint(len(places), (1,), generator=generator))].tolist()
    head = int(torch.randint(recording.model.n_heads, (1,), generator=generator))
    return Site("head", layer, head, dest, src)


def randomly_chosen(recording: Recording, firings: Sequence[Site], generator: torch.Generator) -> list[Site]:
    """For each firing another component of its layer, none of them a firing and none twice."""
    return _drawn(recording, firings, generator, nearest=None)


def matched(recording: Recording, firings: Sequence[Site], generator: torch.Generator) -> list[Site]:
    """For each firing a component of its layer, none of them a firing and none twice, of about its attention.

    Drawn from the sixteen components whose attention is nearest.
    """
    return _drawn(recording, firings, generator, nearest=16)


def _drawn(
    recording: Recording, firings: Sequence[Site], generator: torch.Generator, nearest: int | None
) -> list[Site]:
    free = _free(recording, firings)
    chosen: list[Site] = []
    for site in firings:
        layer: Any = site.layer
        count = int(free[layer].sum())
        if not count:
            continue  # a circuit that holds the whole layer leaves nothing to draw
        pattern = recording.patterns[layer, 0]
        if nearest is None:
            near = free[layer].flatten().nonzero()[:, 0]
        else:
            gap = (pattern - pattern[site.head, site.dest, site.src]).abs()
            gap = gap.masked_fill(~free[layer], float("inf"))
            near = gap.flatten().topk(min(nearest, count), largest=False).indices
        place = int(near[int(torch.randint(len(near), (1,), generator=generator))])
        head, dest, src = (int(i) for i in torch.unravel_index(torch.tensor(place), pattern.shape))
        free[layer, head, dest, src] = False
        chosen.append(Site("head", layer, head, dest, src))
    return chosen


def _free(recording: Recording, firings: Sequence[Site]) -> Bool[Tensor, "layer head dest src"]:
    """Components that there can be and that are none of these firings."""
    free = torch.zeros_like(recording.patterns[:, 0], dtype=torch.bool)
    free |= torch.stack([v[0] for v in recording.visible])[:, None]
    for site in firings:
        place: Any = (site.layer, site.head, site.dest, site.src)
        free[place] = False
    return free
