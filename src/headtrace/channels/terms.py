"""Attention scores of many firings at once, as sums over the channels of their heads.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> places = firing_places(recording, above=0.5)                      # every firing of every head and prompt
>>> terms = terms_of(recording, places)
>>> terms.relative_terms.shape == (len(places), 32)                   # (firing, channel)
True
>>> terms[0].sparseness.shape, terms[0].n_recon.shape, terms[0].signal_sets.shape
(torch.Size([1]), torch.Size([1]), torch.Size([1, 32]))

Every result is checked: terms and remainder must give the recorded logit of every firing.

One firing by itself is a `Decomposition`: ``print(why)`` shows its strongest channels, ``why.plot("why.png")`` draws
them.

>>> why = model.decompose(recording, "L1H2:14:2")                     # layer and head : destination : source
>>> why.tokens[14], why.tokens[2], round(why.attention, 1)
('to', 'Mary', 1.0)
>>> abs(float(why.terms.sum()) - why.logit) < 1e-4                    # checked, whenever one is made
True
>>> why.sparseness < 0.5, why.n_recon < 20 < len(why.terms)           # few of the 32 channels are enough
(True, True)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.channels.sparsity import (
    Control,
    RotationControl,
    first_of_group,
    rotation_control,
    signal_set,
    summed,
)
from headtrace.channels.svd import (
    RANK_TOLERANCE,
    Bias,
    HeadChannels,
    ModelChannels,
    key_weights,
    model_channels,
    thin_triangle,
)
from headtrace.errors import IdentityError
from headtrace.measures import n_recon, relative, sparseness
from headtrace.models.devices import exact, exact_device
from headtrace.models.identities import tolerance_for
from headtrace.models.integrity import require_same_weights
from headtrace.tables import frame as notebook_frame
from headtrace.tables import html_table, paragraph
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.models import Model, Recording

Places = Int[Tensor, "firing 5"]
"""Rows of (layer, prompt, head, dest, src)."""


def exact_channels(model: Model, bias: Bias = "offset") -> ModelChannels:
    """The model's channels in float64, kept while the model lives and its weights stay what they are.

    The inverse of an ill-conditioned W_K has large entries; only float64 keeps their products exact.
    """
    return model.cached(f"exact channels {bias}", lambda: model_channels(model, bias, dtype=torch.float64))


@dataclass(frozen=True, eq=False, repr=False)
class FiringTerms:
    """Many firings, each score a sum over channels. Everything in float64 (on the host where the device has none)."""

    places: Places
    attention: Float[Tensor, " firing"]
    logit: Float[Tensor, " firing"]
    """Recorded attention logit, before any softcap."""
    relative: Float[Tensor, " firing"]
    """Relative attention: the logit less the mean logit of the other visible keys."""
    query: Float[Tensor, "firing channel"]
    """Query coefficients times the attention scale; zero beyond the head's rank."""
    key: Float[Tensor, "firing channel"]
    relative_key: Float[Tensor, "firing channel"]
    """Key coefficients less their mean over the other visible keys."""
    singular_values: Float[Tensor, "firing channel"]
    rank: Int[Tensor, " firing"]
    remainder: Float[Tensor, " firing"]
    """What a rank-deficient head scores outside all its channels (through biases and rotation); else zero."""
    relative_remainder: Float[Tensor, " firing"]

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"FiringTerms({len(self)} firings x {self.query.shape[1]} channels)"

    def frame(self) -> pl.DataFrame:
        """A row per firing: layer, prompt, head, dest, src, attention, logit, relative (attention), rank, remainder."""
        import polars as pl

        places = dict(zip(("layer", "prompt", "head", "dest", "src"), self.places.T.tolist(), strict=True))
        numbers = ("attention", "logit", "relative", "rank", "remainder")
        return pl.DataFrame({**places, **{name: getattr(self, name).tolist() for name in numbers}})

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + notebook_frame(self.frame().head(20))

    def __getitem__(self, rows: int | slice | Tensor) -> FiringTerms:
        """Some of the firings (one number gives a batch of one)."""
        if isinstance(rows, int):
            rows = slice(rows, rows + 1) if rows != -1 else slice(-1, None)
        return FiringTerms(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @cached_property
    def terms(self) -> Float[Tensor, "firing channel"]:
        """Sum (with ``remainder``) to ``logit``."""
        return self.query * self.key

    @cached_property
    def relative_terms(self) -> Float[Tensor, "firing channel"]:
        """Sum (with ``relative_remainder``) to ``relative``."""
        return self.query * self.relative_key

    @cached_property
    def first(self) -> Int[Tensor, "firing channel"]:
        """The first channel of each channel's group: channels of nearly equal singular values are one, and are counted
        and chosen as one below (`headtrace.channels.sparsity`)."""
        return first_of_group(self.singular_values)

    @cached_property
    def n_channels(self) -> Int[Tensor, " firing"]:
        """How many channels each firing's head has, a group counting as one."""
        number = torch.arange(self.query.shape[-1], device=self.rank.device)
        return ((self.first == number) & (number < self.rank[:, None])).sum(dim=-1)

    @cached_property
    def sparseness(self) -> Float[Tensor, " firing"]:
        """Sparseness of the relative terms."""
        return sparseness(summed(self.relative_terms, self.first), self.n_channels.clamp_min(1))

    @cached_property
    def n_recon(self) -> Int[Tensor, " firing"]:
        """How many channels reach the relative attention (what the channels carry of it)."""
        return n_recon(summed(self.relative_terms, self.first))

    @cached_property
    def signal_sets(self) -> Bool[Tensor, "firing channel"]:
        """The 2024 signal set of each firing's logit."""
        return signal_set(summed(self.terms, self.first)).gather(-1, self.first)

    def firing(self, row: int) -> Firing:
        """The firing that a row belongs to."""
        layer, _, head, dest, src = self.places[row].tolist()
        return Firing(layer, head, dest, src)

    def rotated(self, rotations: int = 100, control: Control = "basis", seed: int = 0) -> RotationControl:
        """The relative terms again, under random rotations (`headtrace.channels.sparsity`)."""
        return rotation_control(
            self.query,
            self.relative_key,
            self.singular_values,
            self.rank,
            rotations=rotations,
            control=control,
            seed=seed,
        )


def real_positions(recording: Recording, *, skip_first: bool) -> Bool[Tensor, "batch token"]:
    """Which positions hold a prompt's tokens, not padding; without the first one if wanted."""
    positions = torch.arange(recording.token_ids.shape[1], device=recording.token_ids.device)
    real = positions < torch.tensor(recording.lengths, device=positions.device)[:, None]
    return real & (positions > 0) if skip_first else real


def firing_places(
    recording: Recording, *, above: float = 0.0, skip_first: bool = True, layers: list[int] | None = None
) -> Places:
    """Every place with more attention than ``above``; by default, the first token is left out on both sides."""
    real = real_positions(recording, skip_first=skip_first)
    found: list[Tensor] = []
    for layer in range(recording.model.n_layers) if layers is None else layers:
        allowed = recording.visible[layer] & real[:, :, None] & real[:, None, :]
        rows = ((recording.patterns[layer] > above) & allowed[:, None]).nonzero()
        found.append(torch.cat((torch.full_like(rows[:, :1], layer), rows), dim=1))
    return torch.cat(found)


@torch.inference_mode()
def terms_of(recording: Recording, places: Places, *, bias: Bias = "offset") -> FiringTerms:
    """Decompose the scores at many places; IdentityError if one does not add up to the recorded logit."""
    require_same_weights(recording)
    channels = exact_channels(recording.model, bias)
    places = places.to(exact_device(places.device))
    n, r = len(places), recording.model.d_head
    wide = {name: places.new_empty((n, r), dtype=torch.float64) for name in ("query", "key", "relative_key")}
    flat = {
        name: places.new_zeros(n, dtype=torch.float64)
        for name in ("attention", "logit", "relative", "remainder", "relative_remainder")
    }
    for layer in places[:, 0].unique().tolist():
        rows = (places[:, 0] == layer).nonzero()[:, 0]
        found = _layer_terms(recording, channels.layer(layer), layer, places[rows], bias)
        for name, tensor in {**wide, **flat}.items():
            tensor[rows] = found[name]
    own = channels.at(places[:, 0], places[:, 2])
    return FiringTerms(
        places=places,
        singular_values=own.singular_values,
        rank=own.rank,
        **wide,
        **flat,
    )


@dataclass(frozen=True)
class _LayerScores:
    """Queries and keys of one layer in float64 (keys per query head), and the firings asked for."""

    prompt: Int[Tensor, " firing"]
    head: Int[Tensor, " firing"]
    dest: Int[Tensor, " firing"]
    src: Int[Tensor, " firing"]
    queries: Float[Tensor, "batch head token d_head"]
    keys: Float[Tensor, "batch head token d_head"]
    visible: Bool[Tensor, "batch dest src"]
    scale: float

    @classmethod
    def of(cls, recording: Recording, layer: int, places: Places) -> _LayerScores:
        keys = exact(recording.keys[layer]).repeat_interleave(recording.model.weights.group, dim=1)
        return cls(
            *places.T[1:],
            queries=exact(recording.queries[layer]),
            keys=keys,
            visible=recording.visible[layer].to(keys.device),
            scale=recording.scales[layer],
        )

    def of_head(self, head: int, rows: Int[Tensor, " some"]) -> _LayerScores:
        """Some firings, all of one head."""
        return replace(
            self,
            prompt=self.prompt[rows],
            head=torch.zeros_like(rows),
            dest=self.dest[rows],
            src=self.src[rows],
            queries=self.queries[:, head : head + 1],
            keys=self.keys[:, head : head + 1],
        )

    def query(self, basis: Float[Tensor, "*head d_head n"]) -> Float[Tensor, "firing n"]:
        """Coefficients of the destination's query, times the attention scale."""
        return (self.queries @ basis)[self.prompt, self.head, self.dest] * self.scale

    def key(
        self, basis: Float[Tensor, "*head d_head n"]
    ) -> tuple[Float[Tensor, "firing n"], Float[Tensor, "firing n"]]:
        """Coefficients of the source's key, and the same relative to the other keys that the destination sees."""
        b = self.keys @ basis
        here = b[self.prompt, self.head, self.src]
        total = (self.visible[:, None].to(b.dtype) @ b)[self.prompt, self.head, self.dest]
        return here, relative(here, total, self.seen[:, None])

    def logits(
        self, raw: Float[Tensor, "batch head dest src"]
    ) -> tuple[Float[Tensor, " firing"], Float[Tensor, " firing"], Float[Tensor, " firing"]]:
        """Recorded logits, the same relative to the other visible keys, and the largest size in their rows."""
        seen = raw.masked_fill(~self.visible[:, None], 0)
        here = seen[self.prompt, self.head, self.dest, self.src]
        total, size = (
            rows[self.prompt, self.head, self.dest] for rows in (seen.sum(-1), seen.abs().amax(-1))
        )
        return here, relative(here, total, self.seen), size

    @property
    def seen(self) -> Int[Tensor, " firing"]:
        return self.visible.sum(dim=-1)[self.prompt, self.dest]


def _layer_terms(
    recording: Recording, channels: HeadChannels, layer: int, places: Places, bias: Bias
) -> dict[str, Tensor]:
    scores, at_home = _LayerScores.of(recording, layer, places), places.to(recording.token_ids.device)
    a = scores.query(channels.to_query)
    key, relative_key = scores.key(channels.to_key)
    logit, relative_logit, size = scores.logits(exact(recording.raw_logits(layer)))
    inside = torch.arange(a.shape[-1], device=a.device) < channels.rank[scores.head][:, None]
    found = {
        "attention": exact(recording.patterns[layer][tuple(at_home.T[1:])]),
        "logit": logit,
        "relative": relative_logit,
        "query": a * inside,
        "key": key * inside,
        "relative_key": relative_key * inside,
        "remainder": (a * key * ~inside).sum(dim=-1),
        "relative_remainder": (a * relative_key * ~inside).sum(dim=-1),
    }
    W_K = key_weights(recording.model.weights, layer, bias)
    for head in (channels.rank < a.shape[-1]).nonzero()[:, 0].tolist():
        rows = (scores.head == head).nonzero()[:, 0]
        # Directions that W_K cannot write: keys get there only by bias or rotation.
        null, outside = null_space(W_K[head // recording.model.weights.group]), scores.of_head(head, rows)
        q, (k, relative_k) = outside.query(null), outside.key(null)
        found["remainder"][rows] += (q * k).sum(dim=-1)
        found["relative_remainder"][rows] += (q * relative_k).sum(dim=-1)
    _check(recording, places, found, size.clamp_min(1.0))
    return found


def null_space(W: Float[Tensor, "d r"]) -> Float[Tensor, "r nullity"]:
    """Orthonormal directions of the head's space that ``x @ W`` never reaches."""
    T, _ = thin_triangle(exact(W)[None])
    _, S, right_h = torch.linalg.svd(T[0])
    return right_h[RANK_TOLERANCE * S[0] >= S].mT


def _check(recording: Recording, places: Places, found: dict[str, Tensor], size: Tensor) -> None:
    allowed = tolerance_for(recording.model.dtype)
    for whole, rest, key in (
        ("logit", "remainder", "key"),
        ("relative", "relative_remainder", "relative_key"),
    ):
        made = (found["query"] * found[key]).sum(dim=-1) + found[rest]
        error = torch.nan_to_num((made - found[whole]).abs() / size, nan=torch.inf)
        worst = int(error.argmax())
        if float(error[worst]) > allowed:
            layer, prompt, head, dest, src = places[worst].tolist()
            what = "attention logit" if whole == "logit" else "relative attention"
            raise IdentityError(
                f"The channels of {Firing(layer, head, dest, src)} (prompt {prompt}) do not sum to its "
                f"recorded {what}: {float(made[worst]):.6g} against {float(found[whole][worst]):.6g}, "
                f"relative error {float(error[worst]):.2e} (allowed {allowed:.0e}). Was it made with other "
                "weights?"
            )


# -- one firing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChannelTerm:
    """What one channel contributes to a firing."""

    channel: int
    term: float
    """Its part of the attention logit."""
    relative_term: float
    """Its part of relative attention: what it does for this source more than for the others."""
    singular_value: float
    in_signal_set: bool
    channels: tuple[int, ...] = ()
    """All channels of its group, whose terms are summed here; ``channel`` is the first."""

    @property
    def name(self) -> str:
        """Its number, or the first and the last of its group: ``0-11``."""
        last = self.channels[-1] if self.channels else self.channel
        return str(self.channel) if last == self.channel else f"{self.channel}-{last}"


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """A firing's attention logit (before softcap) and relative attention, channel by channel."""

    firing: Firing
    tokens: tuple[str, ...]
    attention: float
    logit: float
    relative: float
    """Relative attention: the logit less the mean logit of the other visible keys."""
    terms: Float[Tensor, " channel"]
    """Sum, with ``remainder``, to ``logit``."""
    relative_terms: Float[Tensor, " channel"]
    """Sum, with ``relative_remainder``, to ``relative``."""
    singular_values: Float[Tensor, " channel"]
    rank: int
    remainder: float
    """Score outside all channels; zero unless the head is rank-deficient (``rank`` < number of channels)."""
    relative_remainder: float
    signal_set: tuple[int, ...]
    """Channels of the 2024 signal set, by contribution."""
    n_recon: int
    sparseness: float
    batch: FiringTerms = field(repr=False)
    """The coefficients behind the terms, as a batch of one."""

    def top(self, k: int = 5) -> list[ChannelTerm]:
        """The k channels that contribute most to relative attention; those of nearly equal singular values as one."""
        first = self.batch.first[0]
        terms, relative_terms = (summed(each, first) for each in (self.terms, self.relative_terms))
        groups: dict[int, list[int]] = {}
        for channel, leader in enumerate(first.tolist()[: self.rank]):
            groups.setdefault(leader, []).append(channel)
        order = [c for c in relative_terms.argsort(descending=True).tolist() if c in groups][:k]
        return [
            ChannelTerm(
                c,
                float(terms[c]),
                float(relative_terms[c]),
                float(self.singular_values[c]),
                c in self.signal_set,
                tuple(groups[c]),
            )
            for c in order
        ]

    def frame(self) -> pl.DataFrame:
        """A row per channel, those that contribute most first: channel (``0-3`` for a group of equal singular values),
        term and relative_term (parts of the logit and of relative attention), singular_value, in_signal_set."""
        import polars as pl

        names = ("term", "relative_term", "singular_value", "in_signal_set")
        return pl.DataFrame(
            [
                {"channel": each.name, **{name: getattr(each, name) for name in names}}
                for each in self.top(len(self.terms))
            ]
        )

    @property
    def n_effective(self) -> float:
        """How many channels of equal size would be as sparse as the relative attention."""
        return self.sparseness * int(self.batch.n_channels[0])

    @property
    def is_sparse(self) -> bool:
        """Whether a few channels make up the score: effectively two, or a share of at most ``NOT_SPARSE``."""
        return self.n_effective <= max(2.0, NOT_SPARSE * int(self.batch.n_channels[0]))

    @property
    def note(self) -> str | None:
        """A warning if the score is spread over many channels; None if a few make it up."""
        if self.is_sparse:
            return None
        return (
            f"This score is not sparse: it is spread over effectively {self.n_effective:.0f} of "
            f"{int(self.batch.n_channels[0])} channels, as in heads that compare order or size."
        )

    def __repr__(self) -> str:
        return (
            f"Decomposition({self.firing}, attention {self.attention:.3f}, logit {self.logit:.3f} = "
            f"{len(self.terms)} channels, {len(self.signal_set)} in the signal set)"
        )

    def __str__(self) -> str:
        """The strongest channels as a table."""
        titles, rows = _TITLES, [_cells(term) for term in self.top(_SHOWN)]
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (titles, *rows)]
        return "\n".join([self._title(), *lines, *self._rest()])

    def _repr_html_(self) -> str:
        rows = [_cells(term) for term in self.top(_SHOWN)]
        return html_table(_TITLES, rows, title=" ".join([self._title(), *self._rest()]))

    def _title(self) -> str:
        firing = self.firing
        return (
            f"{firing}: {self.tokens[firing.dest]!r} attends to {self.tokens[firing.src]!r} with {self.attention:.3f} "
            f"(logit {self.logit:.3f}, relative {self.relative:.3f})"
        )

    def _rest(self) -> list[str]:
        n_channels = int(self.batch.n_channels[0])
        more = n_channels - _SHOWN
        lines = [f"and {more} more channels; * in the signal set"] if more > 0 else ["* in the signal set"]
        return [*lines, *([] if self.note is None else [self.note])]

    def rotated(self, rotations: int = 100, control: Control = "basis", seed: int = 0) -> RotationControl:
        """The same firing under random rotations of its channels."""
        return self.batch.rotated(rotations, control, seed)

    def plot(self, path: str | None = None) -> Figure:
        """Terms as bars, the signal set marked; saved if a path is given."""
        from headtrace.figures.channels import plot_decomposition

        return plot_decomposition(self, path)

    def to_dict(self) -> dict[str, object]:
        """Plain numbers, for JSON."""
        firing = self.firing
        return {
            "firing": {"layer": firing.layer, "head": firing.head, "dest": firing.dest, "src": firing.src},
            "tokens": list(self.tokens),
            "attention": self.attention,
            "logit": self.logit,
            "relative_attention": self.relative,
            "terms": self.terms.tolist(),
            "relative_terms": self.relative_terms.tolist(),
            "singular_values": self.singular_values.tolist(),
            "rank": self.rank,
            "remainder": self.remainder,
            "relative_remainder": self.relative_remainder,
            "signal_set": list(self.signal_set),
            "n_recon": self.n_recon,
            "sparseness": self.sparseness,
        }


NOT_SPARSE = 0.4
"""A score that is spread over more than this share of its head's channels has no few channels to name: terms drawn at
random have a sparseness of 0.64, a head that compares order one of 0.46."""
_SHOWN = 8
_TITLES = ("channel", "", "term", "relative", "singular value")


def _cells(term: ChannelTerm) -> tuple[str, ...]:
    numbers = (term.term, term.relative_term, term.singular_value)
    return term.name, "*" if term.in_signal_set else "", *(f"{number:.3f}" for number in numbers)


def decompose(
    recording: Recording, firing: Firing | str, prompt: int = 0, *, bias: Bias = "offset"
) -> Decomposition:
    """Decompose one firing (``Firing`` or ``"L9H6:14:3"``); the sum is checked against the recorded logit.

    ``bias="homogeneous"`` gives the 2024 form, for models without rotary positions.
    """
    firing, _ = recording.find_firing(firing, prompt)
    place = torch.tensor(
        [[firing.layer, prompt % len(recording), firing.head, firing.dest, firing.src]],
        device=recording.token_ids.device,
    )
    return decomposition_of(recording, terms_of(recording, place, bias=bias))


def decompose_strongest(recording: Recording, top: int, *, bias: Bias = "offset") -> list[Decomposition]:
    """Each head's strongest firing past the first token, for the ``top`` heads with most attention there."""
    firings = [f for f, _ in sorted(recording.strongest_firings(), key=lambda pair: -pair[1])[:top]]
    places = torch.tensor(
        [[f.layer, 0, f.head, f.dest, f.src] for f in firings], device=recording.token_ids.device
    )
    terms = terms_of(recording, places, bias=bias)
    return [decomposition_of(recording, terms, row) for row in range(len(terms))]


def decomposition_of(recording: Recording, terms: FiringTerms, row: int = 0) -> Decomposition:
    """One row of a batch of firings as an object of its own."""
    one = terms[row]
    signal = one.signal_sets[0].nonzero()[:, 0]
    order = one.terms[0, signal].abs().argsort(descending=True)
    return Decomposition(
        firing=one.firing(0),
        tokens=recording.tokens(int(one.places[0, 1])),
        attention=float(one.attention[0]),
        logit=float(one.logit[0]),
        relative=float(one.relative[0]),
        terms=one.terms[0],
        relative_terms=one.relative_terms[0],
        singular_values=one.singular_values[0],
        rank=int(one.rank[0]),
        remainder=float(one.remainder[0]),
        relative_remainder=float(one.relative_remainder[0]),
        signal_set=tuple(signal[order].tolist()),
        n_recon=int(one.n_recon[0]),
        sparseness=float(one.sparseness[0]),
        batch=one,
    )


def decompose_all(
    recording: Recording,
    prompt: int = 0,
    *,
    above: float = 0.0,
    skip_first: bool = False,
    bias: Bias = "offset",
) -> FiringTerms:
    """All firings of a prompt at once, as tensors: every head and pair with more attention than ``above``."""
    return terms_of(
        recording[prompt], firing_places(recording[prompt], above=above, skip_first=skip_first), bias=bias
    )
