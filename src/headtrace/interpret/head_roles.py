"""What heads are for, as measured scores with names: previous token, same token, induction, first token, copying, ...

>>> import headtrace
>>> roles = head_roles(headtrace.load("builtin"), "sampled:1500")
>>> print(*roles[0, 1])                                                             # L0H1
previous token 0.44 (by chance 0.05)
>>> [role.name for role in roles[1, 2]]
['copying']

A head has a role if its measure is at least as large as the role asks for, and
several times what comes out by chance. It may have several, or none: a role is a name for a number over a corpus, not
an explanation. Atlases show the roles of their heads; ``head_roles`` measures them where there is no atlas.

``HeadSums`` are what heads do over a corpus, as running sums: where they attend, what they say, and which channels make
them attend.

>>> model = headtrace.load("builtin")
>>> sums = HeadSums.empty(model)
>>> sums.add(model.record(["When Mary and John went to the store, John gave a drink to"], keep=RECORDED))
>>> sorted(sums.measures())
['copying', 'distance', 'duplicate', 'entropy', 'induction', 'previous', 'self', 'sink']
>>> sorted(sums.chances())
['copying', 'duplicate', 'induction', 'previous', 'sink']
>>> sums.shares().shape, float(sums.shares()[0, 0].sum().round(decimals=6))
(torch.Size([3, 4, 32]), 1.0)

All measures are means of attention over destinations after the first token, in [0, 1] except for ``entropy`` (nats) and
``distance`` (tokens, over the attention that does not go to the first token):

- ``sink``: to the first token;
- ``previous``, ``self``: to the preceding token, to the token itself;
- ``duplicate``: to earlier occurrences of the same token, where there are any;
- ``induction``: to tokens that come right after an earlier occurrence of it, where there are any.

``copying`` is about what a head writes: how much more it raises the output logit of the token it reads, through the
unembedding, than those of the other tokens of the text. 1 if more than all of them, 0 if it is in their middle, -1 if
it lowers the token below all others; the mean over what the head attends to, weighted by attention, the first token
left out. Layers between the head and the output are left out, too.

What would come out by **chance** is measured beside it: for attention, that of a head that attends evenly to all it
sees; for ``copying``, the same for a token from elsewhere in the text.

The first token counts neither as a duplicate nor as the token before one: it is a sink. These measures are taken on
natural text; `headtrace.tasks.head_scores` scores heads on repeated random tokens.

The **share** of a channel is the part of the head's attention that it accounts for: its scores at the pairs, weighted
by attention (first token left out), minus their mean over the visible sources; the positive part of that, normalised
over the channels of the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.interpret.corpus import Corpus, open_corpus
from headtrace.models.devices import exact, on_host

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.progress import Progress


TIMES_CHANCE = 3.0
"""Attention must be this many times what a head has that attends evenly."""
CHUNKS_AT_ONCE = 16


@dataclass(frozen=True)
class RoleRule:
    """When a head has a role."""

    measure: str
    least: float
    sign: int = 1
    """-1 where low values of the measure are what is asked for."""
    about: str = ""


ROLES: dict[str, RoleRule] = {
    "previous token": RoleRule("previous", 0.3, about="attends to the token before"),
    "same token": RoleRule("duplicate", 0.2, about="attends to earlier occurrences of the token"),
    "induction": RoleRule(
        "induction", 0.2, about="attends to what came after earlier occurrences of the token"
    ),
    "copying": RoleRule("copying", 0.5, about="raises the token that it reads above the others of the text"),
    "suppressing": RoleRule(
        "copying", 0.5, -1, about="lowers the token that it reads below the others of the text"
    ),
    "first token": RoleRule("sink", 0.5, about="rests on the first token"),
}
"""The roles that are told, and the least score of each."""


@dataclass(frozen=True)
class HeadRole:
    """A role of a head, with the number that it stands for."""

    name: str
    score: float
    """The measure; for ``suppressing`` with the sign turned."""
    chance: float
    """What would come out by chance."""

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} (by chance {self.chance:.2f})"


def roles_by_measure(
    measures: Mapping[str, float | None], chances: Mapping[str, float | None]
) -> tuple[HeadRole, ...]:
    """The roles of a head with these measures, in the order of ``ROLES``.

    >>> roles_by_measure({"previous": 0.8, "copying": -0.9, "sink": None}, {"previous": 0.1, "copying": 0.0})
    (HeadRole(name='previous token', score=0.8, chance=0.1), HeadRole(name='suppressing', score=0.9, chance=-0.0))
    """
    found: list[HeadRole] = []
    for name, rule in ROLES.items():
        value, chance = measures.get(rule.measure), chances.get(rule.measure)
        if value is None or chance is None or value != value or chance != chance:  # NaN: no occasion
            continue
        score, by_chance = rule.sign * value, rule.sign * chance
        if score >= rule.least and score >= TIMES_CHANCE * by_chance:
            found.append(HeadRole(name, score, by_chance))
    return tuple(found)


def roles_of_sums(sums: HeadSums) -> dict[tuple[int, int], tuple[HeadRole, ...]]:
    """The roles of all heads, by layer and head."""
    measures = {name: table.tolist() for name, table in sums.measures().items()}
    chances = {name: table.tolist() for name, table in sums.chances().items()}
    n_layers, n_heads = sums.parts.shape[-3:-1]
    return {
        (layer, head): roles_by_measure(
            {name: table[layer][head] for name, table in measures.items()},
            {name: table[layer][head] for name, table in chances.items()},
        )
        for layer in range(n_layers)
        for head in range(n_heads)
    }


def head_roles(
    model: Model,
    corpus: str | Path | Corpus = "sampled:4096",
    *,
    tokens: int | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[tuple[int, int], tuple[HeadRole, ...]]:
    """What every head of a model does over a corpus, by layer and head; the arguments are those of ``scan``."""
    text, sums, read = (
        open_corpus(corpus, model, length=length, seed=seed, tokens=tokens),
        HeadSums.empty(model),
        0,
    )
    chunks = text.chunks()
    while batch := list(islice(chunks, CHUNKS_AT_ONCE)):
        ids = [list(chunk.token_ids) for chunk in batch]
        sums.add(model.record(ids, last_logits=True, keep=RECORDED, patterns="keep"))
        read += sum(map(len, ids))
        if progress is not None:
            progress(read, max(read, text.n_tokens or 0))
    return roles_of_sums(sums)


RECORDED = ("queries", "keys", "values", "patterns")
"""What a recording must keep for ``HeadSums.add``."""
TENSORS = ("sums", "weights", "parts", "by_chance")
MEASURES = ("sink", "previous", "self", "duplicate", "induction", "entropy", "distance", "copying")
CHANCES = ("sink", "previous", "duplicate", "induction", "copying")
"""Measures whose value by chance is known."""


@dataclass(eq=False)
class HeadSums:
    """Sums of each measure, the weights to divide them by, and sums by chance; and sums of the channels' parts."""

    sums: Float[Tensor, "*batch measure layer head"]
    weights: Float[Tensor, "*batch measure layer head"]
    parts: Float[Tensor, "*batch layer head channel"]
    by_chance: Float[Tensor, "*batch chance layer head"]

    @classmethod
    def empty(cls, model: Model) -> HeadSums:
        shape = (model.n_layers, model.n_heads)
        return cls(
            torch.zeros(len(MEASURES), *shape, dtype=torch.float64),
            torch.zeros(len(MEASURES), *shape, dtype=torch.float64),
            torch.zeros(*shape, model.d_head, dtype=torch.float64),
            torch.zeros(len(CHANCES), *shape, dtype=torch.float64),
        )

    @classmethod
    def stacked(cls, batches: Sequence[HeadSums]) -> HeadSums:
        """The sums of several batches along a new first axis, so that they can be added later in a fixed order."""
        return cls(*(torch.stack([getattr(each, name) for each in batches]) for name in TENSORS))

    def add_stacked(self, batches: HeadSums) -> None:
        """Add the sums of several batches one after the other: bit for bit the same wherever they were computed."""
        for name in TENSORS:
            for batch in getattr(batches, name):
                getattr(self, name).add_(batch)

    def measures(self) -> dict[str, Float[Tensor, "layer head"]]:
        """Each measure by name; NaN where the corpus had no occasion for it."""
        return dict(zip(MEASURES, self.sums / self.weights, strict=True))

    def chances(self) -> dict[str, Float[Tensor, "layer head"]]:
        """What some measures would be by chance; NaN where the corpus had no occasion for it."""
        weights = self.weights[[MEASURES.index(name) for name in CHANCES]]
        return dict(zip(CHANCES, self.by_chance / weights, strict=True))

    def shares(self) -> Float[Tensor, "layer head channel"]:
        """The share of each channel; those of a head sum to one."""
        positive = self.parts.clamp_min(0)
        return positive / positive.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)

    @torch.inference_mode()
    def add(self, recording: Recording) -> None:
        """Add the prompts of a recording."""
        relations = {
            prompt: _relations(recording.token_ids[prompt, :length])
            for prompt, length in enumerate(recording.lengths)
            if length > 1
        }
        for layer in range(recording.model.n_layers):
            patterns = recording.patterns[layer]
            for prompt, known in relations.items():
                length = recording.lengths[prompt]
                pattern = patterns[prompt, :, :length, :length]
                rest = pattern[:, 1:]  # destinations after the first token
                copying, elsewhere = copying_by_source(recording, layer, prompt)
                read = pattern.sum(-2)
                read[:, 0] = 0
                totals = known.attended(pattern) | {
                    "self": pattern.diagonal(0, -2, -1)[:, 1:].sum(-1),
                    "entropy": -torch.special.xlogy(rest, rest).sum((-2, -1)),
                    "distance": (rest * known.distance[1:]).sum((-2, -1)),
                    "copying": (read * copying).sum(-1),
                }
                seen = recording.visible[layer][prompt, :length, :length].to(pattern)
                even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
                chance = known.attended(even[None].expand(len(pattern), -1, -1))
                chance["copying"] = (read * elsewhere).sum(-1)
                not_first = rest[..., 1:].sum((-2, -1))
                copied = read.sum(-1) if copying_is_defined(recording.model) else torch.zeros_like(not_first)
                stacked = [*(totals[n] for n in MEASURES), *(chance[n] for n in CHANCES), not_first, copied]
                on_cpu = on_host(torch.stack(stacked))
                self.sums[:, layer] += on_cpu[: len(MEASURES)]
                self.by_chance[:, layer] += on_cpu[len(MEASURES) : -2]
                n = length - 1
                counts = (n, n - 1, n, known.n_same, known.n_after, n, *on_cpu[-2:])  # as in MEASURES
                for row, weight in enumerate(counts):
                    self.weights[row, layer] += weight
                self.parts[layer] += channel_parts(recording, layer, prompt, pattern).cpu()


class _Relations(NamedTuple):
    """Relations between the tokens of a prompt; none to the first token."""

    same: Bool[Tensor, "dest src"]
    """The source is an earlier occurrence of the destination token."""
    after: Bool[Tensor, "dest src"]
    """The source comes right after one."""
    distance: Float[Tensor, "dest src"]
    n_same: int
    n_after: int
    """How many destinations have any such source."""

    def attended(self, pattern: Float[Tensor, "head dest src"]) -> dict[str, Float[Tensor, " head"]]:
        """Attention to the first token, to the one before, to earlier occurrences and to what came after them."""
        return {
            "sink": pattern[:, 1:, 0].sum(-1),
            "previous": pattern.diagonal(-1, -2, -1)[:, 1:].sum(-1),
            "duplicate": (pattern * self.same).sum((-2, -1)),
            "induction": (pattern * self.after).sum((-2, -1)),
        }


def _relations(ids: Int[Tensor, " token"]) -> _Relations:
    positions = torch.arange(len(ids), device=ids.device)
    distance = (positions[:, None] - positions).clamp_min(0).float()
    same = (ids[:, None] == ids) & (distance > 0)
    same[:, 0] = False
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    distance[:, 0] = 0
    return _Relations(same, after, distance, *torch.stack((same, after)).any(-1).sum(-1).tolist())


def copying_is_defined(model: Model) -> bool:
    """Whether the tokens that a model reads are those that it says."""
    return model.d_output == model.d_vocab


@torch.inference_mode()
def copying_by_source(
    recording: Recording, layer: int, prompt: int
) -> tuple[Float[Tensor, "head src"], Float[Tensor, "head src"]]:
    """For every source, where its token is among the tokens of the text by what the head adds to their logits.

    1 is above all others, -1 below. Second: the same for another token of the text, half of it further on.
    """
    model, length = recording.model, recording.lengths[prompt]
    ids, weights = recording.token_ids[prompt, :length], recording.model.weights
    if not copying_is_defined(model):
        nothing = recording.queries.new_zeros(model.n_heads, length)
        return nothing, nothing
    readout = model.architecture.centred(weights.W_U[ids] * weights.final_gain)
    says = weights.W_O[layer] @ readout.T
    values = recording.values[layer, prompt, :, :length] - weights.b_V[layer][:, None]
    effects = values.repeat_interleave(weights.group, dim=0) @ says  # (head, source, token of the text)
    own = torch.arange(length, device=ids.device)
    found: list[Tensor] = []
    for token in (own, (own + length // 2) % length):
        others = (ids[token][:, None] != ids).to(effects)
        effect = effects[:, own, token][..., None]
        above = (effect > effects).to(effects) + 0.5 * (effect == effects).to(effects)
        found.append(2 * (above * others).sum(-1) / others.sum(-1).clamp_min(1) - 1)
    return found[0], found[1]


@torch.inference_mode()
def channel_parts(
    recording: Recording, layer: int, prompt: int, pattern: Float[Tensor, "head dest src"]
) -> Float[Tensor, "head channel"]:
    """What each channel does for the attention of a prompt: its scores where the head attends, minus their mean."""
    length = recording.lengths[prompt]
    channels = exact_channels(recording.model).layer(layer)
    group = recording.model.weights.group
    queries = exact(recording.queries[layer, prompt, :, :length]) * recording.scales[layer]
    keys = exact(recording.keys[layer, prompt, :, :length]).repeat_interleave(group, dim=0)
    a, b = queries @ channels.to_query, keys @ channels.to_key
    seen = exact(recording.visible[layer][prompt, :length, :length])
    seen[:, 0] = 0
    attended = exact(pattern) * seen
    even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    return (a * ((attended - attended.sum(-1, keepdim=True) * even) @ b)).sum(1)
