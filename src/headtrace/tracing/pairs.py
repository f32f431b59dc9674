"""Which writer met which writer? A score as a sum over pairs of components, one of the query and one of the key.

    L[d,s] = sum over components c of the query and c' of the key of  sum over k of  scale * a^c_k * b^c'_k[s]

Components number thousands, their pairs many millions. The largest are found without looking at all of them: a pair is
no larger than the product of the lengths of its two vectors, so with both sides sorted by length, what cannot reach the
k-th largest pair is never multiplied out. What is not listed is one exact remainder.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> why = tracer.explain("When Mary and John went to the store, John gave a drink to", "L2H0:to#2:John#2")
>>> pairs = why.pairs(5)
>>> len(pairs.pairs), abs(sum(pair.value for pair in pairs.pairs) + pairs.remainder - pairs.total) < 1e-4
(5, True)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.tables import html_table
from headtrace.tracing.rather_than import CHANNELS_SHOWN, FiringParts, component_text
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

ROWS_AT_ONCE = 512
"""Components of the query that are multiplied with those of the key at a time."""


@dataclass(frozen=True)
class WriterPair:
    """A component of the query and one of the key, and what they add to the score together."""

    query: Component
    key: Component
    value: float
    """Scores, before a softcap: a difference of one is a ratio of e between attentions."""
    channels: tuple[float, ...] = field(repr=False)
    """The value, channel by channel."""

    def largest_channels(self, n: int = CHANNELS_SHOWN) -> tuple[int, ...]:
        """The n channels that carry most of it."""
        order = sorted(range(len(self.channels)), key=lambda k: -abs(self.channels[k]))
        return tuple(order[:n])


@dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """The largest pairs of a score, or of the difference of two scores, and the exact remainder."""

    firing: Firing
    other: Firing | None
    """The firing whose score is taken away, if two are compared."""
    tokens: tuple[str, ...]
    model: str
    pairs: tuple[WriterPair, ...]
    total: float
    """The score, or the difference: all pairs together, and what lies outside the channels of the head."""
    remainder: float
    """All that is not listed."""
    queries: tuple[Component, ...]
    keys: tuple[Component, ...]
    matrix: Float[Tensor, "query key"]
    """What the components of the listed pairs add to the score, each with each."""

    def names(self, pair: WriterPair) -> tuple[str, str]:
        """Both components with token text."""
        return self.query_name(pair.query), self.key_name(pair.key)

    def query_name(self, component: Component) -> str:
        """A component of the query, with token text."""
        return component_text(component, self.firing.dest, self.tokens)

    def key_name(self, component: Component) -> str:
        """A component of the key, with token text."""
        return component_text(component, self.firing.src, self.tokens, self.other and self.other.src)

    def frame(self) -> pl.DataFrame:
        """One row per pair, the largest first: query, key, value, channels (those that carry most), channel_values."""
        import polars as pl

        rows = [
            {
                "query": self.query_name(pair.query),
                "key": self.key_name(pair.key),
                "value": pair.value,
                "channels": list(pair.largest_channels()),
                "channel_values": [pair.channels[k] for k in pair.largest_channels()],
            }
            for pair in self.pairs
        ]
        many: Any = {"channels": pl.List(pl.Int64), "channel_values": pl.List(pl.Float64)}
        return pl.DataFrame(rows, schema={"query": pl.String, "key": pl.String, "value": pl.Float64} | many)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        listed = [
            {"query": asdict(p.query), "key": asdict(p.key), "value": p.value, "channels": list(p.channels)}
            for p in self.pairs
        ]
        return {"total": self.total, "remainder": self.remainder, "pairs": listed}

    def plot(self, path: str | Path | None = None) -> Figure:
        """A heat map of the components of the listed pairs."""
        from headtrace.figures.channels import plot_pairs

        return plot_pairs(self, path)

    def title(self) -> str:
        """What adds up, in one line."""
        than = "" if self.other is None else f" rather than {self.other.src} {self.tokens[self.other.src]!r}"
        what = "score" if self.other is None else "difference of scores"
        by = "by writer of the query x writer of the key"
        return f"{self.firing}{than}: the {what}, {self.total:+.3f} (before softmax), {by}"

    def __repr__(self) -> str:
        return f"Pairs({self.firing}, {len(self.pairs)} pairs, total {self.total:+.3f}, rest {self.remainder:+.3f})"

    def _repr_html_(self) -> str:
        rows = [(f"{pair.value:+.3f}", *self.names(pair), _shown(pair)) for pair in self.pairs]
        rows.append((f"{self.remainder:+.3f}", "all other pairs", "", ""))
        return html_table(("score", "query", "key", "channels"), rows, title=self.title())

    def __str__(self) -> str:
        lines = [self.title()]
        for pair in self.pairs:
            query, key = self.names(pair)
            lines.append(f"  {pair.value:+.3f}  {query}  x  {key}  channels {_shown(pair)}")
        return "\n".join([*lines, f"  {self.remainder:+.3f}  all other pairs"])


def _shown(pair: WriterPair) -> str:
    return ", ".join(f"{k} ({pair.channels[k]:+.2f})" for k in pair.largest_channels())


@torch.inference_mode()
def largest_pairs(parts: FiringParts, k: int, model: str, tokens: tuple[str, ...], *, against: bool) -> Pairs:
    """The k largest pairs of the score of a firing; with ``against``, of its difference from that of the second one."""
    if k < 1:
        raise InputError(f"pairs({k}): expected at least 1 pair.")
    s, index = parts.scores, parts.index
    # The root of each singular value to both sides: the product is the same, and its bound closer.
    balance = s.to_query[0].norm(dim=0).sqrt() / s.to_key[0].norm(dim=0).sqrt().clamp_min(1e-30)
    balance = torch.where(balance > 0, balance, torch.ones_like(balance))

    def queries(chosen: Int[Tensor, " n"]) -> Float[Tensor, "n channel"]:
        return parts.query_coefficients(chosen) / balance * s.scale

    def keys(chosen: Int[Tensor, " n"]) -> Float[Tensor, "n channel"]:
        found = parts.key_coefficients(0, chosen)
        return (found - parts.key_coefficients(1, chosen) if against else found) * balance

    # Most head components are too short to matter: they are left out before anything of them is computed.
    bounds = _bounds(parts, balance, against)
    longest = [bound.topk(min(ROWS_AT_ONCE, len(bound))).indices for bound in bounds]
    corner = (queries(longest[0]) @ keys(longest[1]).T).abs().flatten()
    least = float(corner.topk(k).values[-1]) * (1 - 1e-4) if k <= len(corner) else 0.0
    reach = bounds[0] * bounds[1].max(), bounds[1] * bounds[0].max()
    near_query, near_key = ((each >= least).nonzero()[:, 0] for each in reach)
    a, b = queries(near_query), keys(near_key)
    q, c, values = _largest(a, b, k)
    by_channel, rows, columns = (
        a[q] * b[c],
        *(list(dict.fromkeys(each.tolist())) for each in (q, c)),
    )
    matrix = a[rows] @ b[columns].T
    rows, columns = near_query[rows].tolist(), near_key[columns].tolist()
    q, c = near_query[q], near_key[c]
    score = float(s.logits[0, parts.sources[0]] - (s.logits[0, parts.sources[1]] if against else 0.0))
    site = s.firings.sites[0][1]

    def components(numbers: list[int]) -> tuple[Component, ...]:
        return tuple(index.component(number, site) for number in numbers)

    pairs = tuple(
        WriterPair(index.component(i, site), index.component(j, site), value, tuple(channels))
        for i, j, value, channels in zip(
            q.tolist(), c.tolist(), values.tolist(), by_channel.tolist(), strict=True
        )
    )
    firing, *others = (site.firing for _, site in s.firings.sites)
    return Pairs(
        *(firing, others[0] if against else None, tokens, model, pairs),
        *(score, score - sum(pair.value for pair in pairs)),
        *(components(rows), components(columns), matrix),
    )


def _bounds(
    parts: FiringParts, balance: Float[Tensor, " channel"], against: bool
) -> tuple[Float[Tensor, " component"], Float[Tensor, " component"]]:
    """No vector of a component is longer than this, on each side: of heads, from what is known of them already."""
    q, key, s = parts.query, parts.key, parts.scores
    non_head = torch.arange(parts.index.n_non_head, device=s.a.device)

    def of_heads(strength: Tensor, norms: Tensor, basis: Tensor) -> Tensor:
        return (strength.abs() * norms).flatten() * torch.linalg.matrix_norm(basis, ord=2)

    query = torch.cat(
        (
            parts.query_coefficients(non_head).div(balance).norm(dim=-1),
            of_heads(q.strength[0], q.readings.norms[0], q.basis[0] / balance),
        )
    )
    bases = s.rotary.basis_at(s.to_key, s.firings.src) * balance
    keys = [
        torch.cat(
            (
                parts.key_coefficients(row, non_head).mul(balance).norm(dim=-1),
                of_heads(key.strength[row], key.readings.norms[row], bases[row]),
            )
        )
        for row in ((0, 1) if against else (0,))
    ]
    slack = 1 + 1e-4  # bounds are rounded, too
    return query * s.scale * slack, torch.stack(keys).sum(0) * slack


def _largest(
    a: Float[Tensor, "query channel"], b: Float[Tensor, "key channel"], k: int
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"], Float[Tensor, " pair"]]:
    """The k largest entries of ``a @ b.T`` in absolute value, in order, without multiplying out what cannot be among
    them (Cauchy and Schwarz)."""
    (long_a, order_a), (long_b, order_b) = (x.norm(dim=-1).sort(descending=True, stable=True) for x in (a, b))
    a, b = a[order_a], b[order_b]
    k = min(k, len(a) * len(b))
    # The k-th largest pair of the longest vectors: no pair below it is among the k largest of all.
    corner = (a[:ROWS_AT_ONCE] @ b[:ROWS_AT_ONCE].T).abs().flatten()
    slack = 1 - 1e-5  # lengths and products are rounded
    least = float(corner.topk(k).values[-1]) * slack if k <= len(corner) else 0.0
    best, where = a.new_empty(0), torch.empty(0, dtype=torch.long, device=a.device)
    for start in range(0, len(a), ROWS_AT_ONCE):
        reach = int((long_b * long_a[start] >= least * slack).sum())
        if reach == 0:
            break
        found = (a[start : start + ROWS_AT_ONCE] @ b[:reach].T).flatten()
        place = found.abs().topk(min(k, len(found))).indices
        best = torch.cat((best, found[place]))
        where = torch.cat((where, (place // reach + start) * len(b) + place % reach))
        keep = best.abs().topk(min(k, len(best))).indices
        best, where = best[keep], where[keep]
        if len(best) == k:
            least = max(least, float(best[-1].abs()) * slack)
    return order_a[where // len(b)], order_b[where % len(b)], best
