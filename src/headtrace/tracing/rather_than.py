"""Why here rather than there? Two attention scores of one head and destination, compared term by term.

For one destination d and two keys s and s2, ``ln A[d,s] - ln A[d,s2] = L[d,s] - L[d,s2]``: the normaliser cancels, so
the ratio of two attentions is linear in what was written, with no threshold and no path:

    query side:  sum over components c, channels k of  scale * a^c_k * (b_k[s] - b_k[s2])
    key side:    sum over components c, channels k of  scale * a_k * (b^c_k[s] - b^c_k[s2])

What both keys share cancels. Each side alone adds up to the whole; what lies outside the channels of a rank-deficient
head is the remainder. Where a model caps its scores, terms carry the slope of the cap's secant between the two, so that
they still add up. The same sum against the token that a head does attend to says why it does *not* attend somewhere.

>>> import headtrace
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> why = tracer.explain(prompt, "L2H0:to#2:John#2", rather_than="Mary").rather_than
>>> for side in ("query", "key"):
...     assert abs(why.sum(side) + why.remainder - why.log_ratio) < 1e-3
>>> why.top(1)[0].value > 1
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.attention import softcap, softcap_slope
from headtrace.models.identities import tolerance_for
from headtrace.tables import html_table
from headtrace.tracing.components import ComponentIndex, Firings, Upstream
from headtrace.tracing.firing import FiringScores, KeyCandidates, QueryCandidates
from headtrace.tracing.readings import Composer
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Component, Firing

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.models import Recording

SHOWN = 6
"""Terms that are printed of each side."""
CHANNELS_SHOWN = 3
SHARE_SHOWN = 0.1
"""A channel is printed if it carries this share of its term, and it is among the largest few."""


def component_text(component: Component, at: int, tokens: Sequence[str], less: int | None = None) -> str:
    """A component where it is read, with token text: ``L5H3 from 3 ' John'``, ``mlp 4 at 13 ' to'``; with ``less``, its
    difference from what it is at another token."""
    if component.kind == "head" and component.src is not None:
        return f"{component} {tokens[component.src]!r}"
    rest = "" if less is None else f" less at {less} {tokens[less]!r}"
    return f"{component} at {at} {tokens[at]!r}{rest}"


@dataclass(frozen=True, eq=False)
class FiringParts:
    """The query of one destination and its keys, split into components: firings of one head and destination."""

    scores: FiringScores
    query: QueryCandidates
    key: KeyCandidates

    @classmethod
    @torch.inference_mode()
    def of(
        cls, recording: Recording, composer: Composer, firings: Sequence[Firing], prompt: int = 0
    ) -> FiringParts:
        """Of firings with the same head and destination; sums are checked against the recorded scores."""
        first = firings[0]
        rows = Firings.of([(prompt, firing.site) for firing in firings], recording.model.device)
        upstream = Upstream(recording, composer, first.layer, first.dest + 1)
        with recording.model.assume_weights_unchanged():
            scores = FiringScores.of(recording, rows, upstream.length, ig_steps=1)
            query, key = QueryCandidates.of(scores, upstream), KeyCandidates.of(scores, upstream)
            scores.require(query, key)
        return cls(scores, query, key)

    @property
    def index(self) -> ComponentIndex:
        """The numbers of components."""
        return self.query.index

    @property
    def sources(self) -> list[int]:
        """The key of each row."""
        return self.scores.firings.src.tolist()

    def query_totals(self, slope: Float[Tensor, " channel"]) -> Float[Tensor, " component"]:
        """``sum over k of a^c_k slope_k`` for every component."""
        q = self.query
        heads = q.strength[0].flatten() * (q.readings.rows @ (q.basis[0] @ slope))[q.readings.numbers[0]]
        return torch.cat((q.non_head_coefficients[0] @ slope, heads))

    def key_totals(self, row: int, slope: Float[Tensor, " channel"]) -> Float[Tensor, " component"]:
        """``sum over k of b^c_k slope_k`` for every component, at the key of a row."""
        k, s = self.key, self.scores
        onto = s.rotary.basis_at(s.to_key, s.firings.src)[row] @ slope
        heads = k.strength[row].flatten() * (k.readings.rows @ onto)[k.readings.numbers[row]]
        return torch.cat((k.non_head_keys[row, :, self.sources[row]] @ (s.to_key[row] @ slope), heads))

    def query_coefficients(self, chosen: Int[Tensor, " n"]) -> Float[Tensor, "n channel"]:
        """``a^c_k`` of some components."""
        q = self.query
        return self._coefficients(
            chosen,
            q.non_head_coefficients[0],
            q.strength[0],
            q.readings.rows,
            q.basis[0],
            q.readings.numbers[0],
        )

    def key_coefficients(self, row: int, chosen: Int[Tensor, " n"]) -> Float[Tensor, "n channel"]:
        """``b^c_k`` of some components, at the key of a row."""
        k, s = self.key, self.scores
        basis = s.rotary.basis_at(s.to_key, s.firings.src)[row]
        non_head = k.non_head_keys[row, :, self.sources[row]] @ s.to_key[row]
        return self._coefficients(
            chosen, non_head, k.strength[row], k.readings.rows, basis, k.readings.numbers[row]
        )

    def _coefficients(
        self, chosen: Tensor, non_head: Tensor, strength: Tensor, rows: Tensor, basis: Tensor, numbers: Tensor
    ) -> Float[Tensor, "n channel"]:
        n = self.index.n_non_head
        found = non_head[chosen.clamp_max(n - 1)]
        is_head = chosen >= n
        if bool(is_head.any()):
            number = chosen[is_head] - n
            read = rows[numbers[number]] * strength.flatten()[number][:, None]
            found[is_head] = read @ basis
        return found

    def key_means(self, chosen: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """What some components add to the score of a key, on average over all visible keys, on the key side."""
        seen = self.scores.visible.to(self.scores.w.dtype)
        uniform = replace(self.key, scores=replace(self.scores, w=seen / seen.sum(-1, keepdim=True)))
        n = self.index.n_non_head
        found = uniform.non_head[0].sum(-1)[chosen.clamp_max(n - 1)]
        is_head = chosen >= n
        if bool(is_head.any()):
            one = torch.zeros(1, dtype=torch.long, device=chosen.device)
            found[is_head] = uniform.of_heads(one, chosen[is_head][None] - n)[0].sum(-1)
        return found


@dataclass(frozen=True)
class RatioTerm:
    """What one component adds to the logarithm of a ratio of attentions, on one side."""

    side: AttentionSide
    component: Component
    value: float
    """Its share of ``ln A[d,s] - ln A[d,s2]``."""
    here: float
    """What it adds to the score of the first key (before a softcap)."""
    there: float
    """What it adds to the score of the second key."""
    mean: float
    """What it adds to the score of a visible key, on average."""
    channels: tuple[float, ...] = field(repr=False)
    """The value, channel by channel."""

    @property
    def lowers_here(self) -> bool:
        """Whether most of a negative value is suppression: it puts this key below the average one."""
        return self.value < 0 and self.mean - self.here >= self.there - self.mean


@dataclass(frozen=True, eq=False, repr=False)
class RatherThan:
    """Why a head attends to one token rather than to another: an exact sum over components and channels, on each
    side."""

    firing: Firing
    other: Firing
    tokens: tuple[str, ...]
    model: str
    attention: float
    other_attention: float
    score: float
    """The score ``L[d,s]``, before a softcap."""
    other_score: float
    log_ratio: float
    """``ln A[d,s] - ln A[d,s2]``: how much more attention the first token gets."""
    remainder: float
    """What lies outside the channels of a rank-deficient head, in the unit of the logarithm."""
    cap: float | None
    slope: float
    """From scores to the logarithm: one without a softcap, else the slope of its secant between the two scores."""
    totals: dict[AttentionSide, Float[Tensor, " component"]]
    """The value of every component."""
    parts: FiringParts
    row: int = 1
    """Which firing of the parts the other one is."""

    @classmethod
    @torch.inference_mode()
    def of(cls, parts: FiringParts, model: str, tokens: tuple[str, ...], other_row: int = 1) -> RatherThan:
        """Compare the first firing of ``parts`` with another one; both sides must add up to the recorded ratio."""
        scores, here, there = parts.scores, parts.sources[0], parts.sources[other_row]
        firing, other = (scores.firings.sites[row][1].firing for row in (0, other_row))
        row, cap = scores.logits[0], scores.cap
        one, two = row[here], row[there]
        capped = softcap(torch.stack((one, two)), cap)
        log_ratio, raw = float(capped[0] - capped[1]), float(one - two)
        slope = 1.0
        if cap is not None:
            near = abs(raw) < 1e-3 * cap
            slope = float(softcap_slope((one + two) / 2, cap)) if near else log_ratio / raw
            log_ratio = slope * raw
        difference = (scores.b[0, here] - scores.b[0, there]) * scores.scale * slope
        onto = scores.a[0] * scores.scale * slope
        totals: dict[AttentionSide, Tensor] = {
            "query": parts.query_totals(difference),
            "key": parts.key_totals(0, onto) - parts.key_totals(other_row, onto),
        }
        remainder = log_ratio - float(scores.a[0] @ difference)
        remainder = 0.0 if bool(scores.full_rank[0]) else remainder
        size = slope * max(1.0, float((row * scores.visible[0]).abs().max()))
        allowed = tolerance_for(scores.recording.model.dtype)
        for side, values in totals.items():
            error = abs(float(values.sum()) + remainder - log_ratio) / size
            if not error <= allowed:
                raise IdentityError(
                    f"{firing} rather than {other}: the {side} side sums to {float(values.sum()) + remainder:.6g}, the "
                    f"logarithm of the ratio is {log_ratio:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
                )
        clean = scores.attention(scores.logits).tolist()
        return cls(
            *(firing, other, tokens, model, clean[0], clean[other_row], float(one), float(two)),
            *(log_ratio, remainder, cap, slope, totals, parts, other_row),
        )

    def sum(self, side: AttentionSide) -> float:
        """All components of a side together."""
        return float(self.totals[side].sum())

    @cached_property
    def channels(self) -> tuple[float, ...]:
        """The logarithm of the ratio, channel by channel: the same on both sides."""
        s, here, there = self.parts.scores, self.firing.src, self.other.src
        return tuple((s.a[0] * (s.b[0, here] - s.b[0, there]) * s.scale * self.slope).tolist())

    def top(self, k: int = 5, side: AttentionSide | None = None) -> list[RatioTerm]:
        """The k largest terms (of one side), whatever their sign."""
        found = [
            term
            for each in (ATTENTION_SIDES if side is None else (side,))
            for term in self.terms(each, self.totals[each].abs().topk(min(k, len(self.totals[each]))).indices)
        ]
        return sorted(found, key=lambda term: -abs(term.value))[:k]

    def lowest(self, k: int = 5, side: AttentionSide | None = None) -> list[RatioTerm]:
        """The k most negative terms (of one side): what holds the first token down."""
        found = [
            term
            for each in (ATTENTION_SIDES if side is None else (side,))
            for term in self.terms(each, (-self.totals[each]).topk(min(k, len(self.totals[each]))).indices)
            if term.value < 0
        ]
        return sorted(found, key=lambda term: term.value)[:k]

    @torch.inference_mode()
    def terms(self, side: AttentionSide, chosen: Int[Tensor, " n"]) -> list[RatioTerm]:
        """The terms of components by their numbers, with their channels."""
        parts, s, here, there = self.parts, self.parts.scores, self.firing.src, self.other.src
        if side == "query":
            coefficients = parts.query_coefficients(chosen) * s.scale
            seen = s.visible[0].to(s.b.dtype)
            one, two, mean = s.b[0, here], s.b[0, there], (seen @ s.b[0]) / seen.sum()
            by_channel, (at_here, at_there, at_mean) = (
                coefficients * (one - two) * self.slope,
                (coefficients @ key for key in (one, two, mean)),
            )
        else:
            onto = s.a[0] * s.scale
            one, two = (parts.key_coefficients(row, chosen) * onto for row in (0, self.row))
            by_channel, at_here, at_there = (one - two) * self.slope, one.sum(-1), two.sum(-1)
            at_mean = parts.key_means(chosen)
        site = s.firings.sites[0][1]
        rows = zip(
            *(chosen.tolist(), self.totals[side][chosen].tolist(), at_here.tolist(), at_there.tolist()),
            *(at_mean.tolist(), by_channel.tolist()),
            strict=True,
        )
        return [
            RatioTerm(side, parts.index.component(number, site), value, a, b, m, tuple(channels))
            for number, value, a, b, m, channels in rows
        ]

    def without(self, terms: Iterable[RatioTerm]) -> float:
        """The logarithm of the ratio if terms of one side were not there: what the running model then shows."""
        gone = list(terms)
        if len({term.side for term in gone}) > 1:
            raise InputError(
                "Terms of both sides cannot be taken away together: a score is a product of its sides."
            )
        scores = torch.tensor(
            [
                self.score - sum(term.here for term in gone),
                self.other_score - sum(term.there for term in gone),
            ],
            dtype=torch.float64,
        )
        capped = softcap(scores, self.cap)
        return float(capped[0] - capped[1])

    # -- showing ---------------------------------------------------------------------------------------------

    def place(self, term: RatioTerm) -> str:
        """A term's component with token text."""
        return self._name(term.side, term.component)

    def _name(self, side: AttentionSide, component: Component) -> str:
        if side == "query":
            return component_text(component, self.firing.dest, self.tokens)
        return component_text(component, self.firing.src, self.tokens, self.other.src)

    def frame(self, least: float = 0.0) -> pl.DataFrame:
        """One row per side and component with an absolute value above ``least``: side, component, kind, layer, head,
        src, value, largest first."""
        import polars as pl

        rows: list[dict[str, Any]] = []
        for side, values in self.totals.items():
            chosen = (values.abs() > least).nonzero()[:, 0]
            for number, value in zip(chosen.tolist(), values[chosen].tolist(), strict=True):
                component = self.parts.index.component(number, self.firing.site)
                named = {"side": side, "component": self._name(side, component)}
                rows.append({**named, **asdict(component), "value": value})
        kinds = {"side": pl.String, "component": pl.String, "kind": pl.String, "layer": pl.Int64}
        schema = pl.Schema(kinds | {"head": pl.Int64, "src": pl.Int64, "value": pl.Float64})
        return pl.DataFrame(rows, schema=schema).sort(pl.col("value").abs(), descending=True)

    def to_dict(self, k: int = 20) -> dict[str, Any]:
        """Plain data, for JSON: the k largest terms of each side, and the rest as one number."""

        def side(name: AttentionSide) -> dict[str, Any]:
            terms = self.top(k, name)
            listed = [
                {**asdict(t.component), "value": t.value, "here": t.here, "there": t.there, "mean": t.mean}
                | {"channels": list(t.channels)}
                for t in terms
            ]
            return {"terms": listed, "rest": self.sum(name) - sum(t.value for t in terms)}

        return {
            "firing": asdict(self.firing),
            "rather_than": asdict(self.other),
            "attention": self.attention,
            "other_attention": self.other_attention,
            "log_ratio": self.log_ratio,
            "remainder": self.remainder,
            "softcap_slope": self.slope,
            "channels": list(self.channels),
            "query": side("query"),
            "key": side("key"),
        }

    def plot(self, path: str | Path | None = None, k: int = 10) -> Figure:
        """The k largest terms of each side as bars."""
        from headtrace.figures.channels import plot_rather_than

        return plot_rather_than(self, k, path)

    def token(self, position: int) -> str:
        """A token with its position: ``' John' (9)``."""
        return f"{self.tokens[position]!r} ({position})"

    def title(self) -> str:
        """Both attentions and their ratio, in one line."""
        f, o, times = self.firing, self.other, exp(min(abs(self.log_ratio), 700.0))
        more = "times as much" if self.log_ratio >= 0 else "times less"
        return (
            f"{f}: {self.token(f.dest)} attends to {self.token(f.src)} with {self.attention:.3g} and to "
            f"{self.token(o.src)} with {self.other_attention:.3g}: ln ratio {self.log_ratio:+.3f} ({times:.3g} {more})"
        )

    def __repr__(self) -> str:
        return f"RatherThan({self.firing} rather than {self.other.src}, ln ratio {self.log_ratio:+.3f}, {self.model!r})"

    def _repr_html_(self) -> str:
        terms = [term for side in ATTENTION_SIDES for term in self.top(SHOWN, side)]
        rows = [
            (t.side, f"{t.value:+.3f}", self.place(t), f"{t.here:+.3f}", f"{t.there:+.3f}", _channels(t))
            for t in terms
        ]
        titles = ("side", "ln ratio", "component", "here", "there", "channels (ln ratio)")
        return html_table(titles, rows, title=self.title())

    def __str__(self) -> str:
        return "\n".join([self.title(), *self.lines(held_down=False)])

    def lines(self, *, held_down: bool) -> list[str]:
        """The terms of both sides in words; with ``held_down``, the negative ones, and how each of them acts."""
        lines: list[str] = []
        for side in ATTENTION_SIDES:
            terms = self.lowest(SHOWN, side) if held_down else self.top(SHOWN, side)
            whole, shown = self.sum(side), sum(t.value for t in terms)
            about = (
                f"what {self.token(self.firing.dest)} holds"
                if side == "query"
                else "what the two tokens hold"
            )
            lines.append(f"  {side} side ({about}): {whole:+.3f} in ln ratio")
            for t in terms:
                how = f"  {self._how(t)}" if held_down else ""
                lines.append(f"    {t.value:+.3f}  {self.place(t)}  channels {_channels(t)}{how}")
            lines.append(f"    {whole - shown:+.3f}  all other components")
        if self.remainder:
            lines.append(f"  {self.remainder:+.3f} lies outside the head's channels (its rank is deficient)")
        return lines

    def _how(self, term: RatioTerm) -> str:
        if term.lowers_here:
            amount = (term.here - term.mean) * self.slope
            return f"suppresses {self.token(self.firing.src)}: {amount:+.3f} against the average key"
        amount = (term.there - term.mean) * self.slope
        return f"raises {self.token(self.other.src)}: {amount:+.3f} against the average key"


def _channels(term: RatioTerm) -> str:
    """The few channels that carry a term."""
    order = sorted(range(len(term.channels)), key=lambda k: -abs(term.channels[k]))
    size = max(abs(term.value), 1e-12)
    shown = [k for k in order[:CHANNELS_SHOWN] if abs(term.channels[k]) >= SHARE_SHOWN * size] or order[:1]
    return ", ".join(f"{k} ({term.channels[k]:+.2f})" for k in shown)
