"""One firing's attention score as a sum over the channels of its head.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> why = model.decompose(recording, "L1H2:14:2")                     # layer and head : destination : source
>>> why.tokens[14], why.tokens[2], round(why.attention, 1)
('to', 'Mary', 1.0)
>>> abs(float(why.terms.sum()) - why.logit) < 1e-4                    # checked, whenever one is made
True
>>> [best.in_signal_set for best in why.top(2)]                       # the channels that make the head attend there
[True, True]
>>> why.sparseness < 0.5, why.n_recon < 20 < len(why.terms)           # few of the 32 do it
(True, True)

``print(why)`` shows the strongest channels as a table, ``why.plot("why.png")`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.sparsity import Control, RotationControl
from headtrace.channels.svd import Bias
from headtrace.channels.terms import FiringTerms, firing_places, terms_of
from headtrace.tables import html_table
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Recording


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
        """The k channels that contribute most to relative attention."""
        order = self.relative_terms.argsort(descending=True)[: min(k, self.rank)].tolist()
        return [
            ChannelTerm(
                c,
                float(self.terms[c]),
                float(self.relative_terms[c]),
                float(self.singular_values[c]),
                c in self.signal_set,
            )
            for c in order
        ]

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
        more = self.rank - _SHOWN
        return [f"and {more} more channels; * in the signal set"] if more > 0 else ["* in the signal set"]

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


_SHOWN = 8
_TITLES = ("channel", "", "term", "relative", "singular value")


def _cells(term: ChannelTerm) -> tuple[str, ...]:
    numbers = (term.term, term.relative_term, term.singular_value)
    return str(term.channel), "*" if term.in_signal_set else "", *(f"{number:.3f}" for number in numbers)


def decompose(
    recording: Recording, firing: Firing | str, prompt: int = 0, *, bias: Bias = "offset"
) -> Decomposition:
    """Decompose one firing (``Firing`` or ``"L9H6:14:3"``); the sum is checked against the recorded logit.

    ``bias="homogeneous"`` gives the 2024 form, for models without rotary positions.
    """
    firing = Firing.parse(firing)
    recording.check_firing(firing, prompt)
    place = torch.tensor(
        [[firing.layer, prompt % len(recording), firing.head, firing.dest, firing.src]],
        device=recording.token_ids.device,
    )
    return decomposition_of(recording, terms_of(recording, place, bias=bias))


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
