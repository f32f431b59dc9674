"""The flow of every component between two runs, and what enters it: what a sweep of differences found.

A component's flow is what it writes differently along its multiplier. It is a sum over what the component reads: over
the sides of a head (query, key, value), over upstream components, and over the channels of a query or a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribute_root import Place
from headtrace.tracing.components import ComponentIndex
from headtrace.tracing.root_difference import RootDifference
from headtrace.tracing.secants import AttentionSecant, HeadFlow, MlpSecant, raw_weights
from headtrace.vocabulary import Firing, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

SHARES_AT_ONCE = 16_000_000
"""Flows of upstream components that are computed at once (64 MB in float32)."""
STRONGEST = 128
"""Edges that are kept of each residual that a node reads, unless another number is given."""


@dataclass(frozen=True)
class FlowRead:
    """A residual that a node reads, and the multiplier of it on the way through that node."""

    side: Side
    place: Place
    multiplier: Float[Tensor, " d_model"]


@dataclass(frozen=True)
class FlowEdge:
    """What flows from one node into another, in the unit of the root."""

    source: Site
    target: Site
    side: Side
    flow: float


@dataclass(frozen=True)
class ScoreMultipliers:
    """Through head components of one layer: the multipliers of what their attention is computed from."""

    mean: Float[Tensor, "component src"]
    """``A~``, the mean of the two patterns."""
    logits: Float[Tensor, "component src"]
    """... of each ``q . k``; times ``queries``: of the keys."""
    query: Float[Tensor, "component d_head"]
    """... of the query."""
    queries: Float[Tensor, "component d_head"]
    """``q~``, the mean of the two queries."""


@dataclass(frozen=True, repr=False)
class DifferenceFlow:
    """The flow from every component to the roots of a batch of pairs of prompts (`difference_flow`)."""

    recording: Recording
    other: Recording
    roots: tuple[RootDifference, ...]
    layers: tuple[AttentionSecant, ...]
    residual: Float[Tensor, "layer_and_final batch token d_model"]
    """Multipliers of the residual at the input of every layer (the first: of the embedding, the last: of the final
    norm's input). A layer's MLP writes into the next one's."""
    attention: Float[Tensor, "layer batch token d_model"]
    """... of what attention writes."""
    through_mlp: Float[Tensor, "layer batch token d_model"]
    """... of the residual that an MLP reads, through that MLP."""
    onto: Float[Tensor, "layer batch head token d_head"]
    """... of a head's mixture of values, at each destination."""
    rounding: Float[Tensor, "layer_and_final batch token"]
    """What rounding in each layer adds, by token; the last row: in the output logits. Zero in full precision."""
    writes_rounding: Float[Tensor, "layer batch token d_model"] | None
    """In half precision, ``D`` of what rounding added to the residual in each layer."""
    error: float
    """The largest error of the identity at any cut, relative to the sum of magnitudes there."""
    strongest: tuple[dict[Site, tuple[float, float]], ...]
    """By pair, the head components of each layer with the largest flows: what each moves, and attends, differently."""
    kept_mlps: dict[int, MlpSecant]
    """The secants of the MLPs by layer, those of short prompts all (`mlp_at` computes the others again)."""

    def __repr__(self) -> str:
        return (
            f"DifferenceFlow({len(self.roots)} pair(s): {self.value.tolist()} - {self.other_value.tolist()})"
        )

    @property
    def value(self) -> Float[Tensor, " batch"]:
        """J, in the clean prompts."""
        return self.residual.new_tensor([root.value for root in self.roots])

    @property
    def other_value(self) -> Float[Tensor, " batch"]:
        """J', in the other prompts."""
        return self.residual.new_tensor([root.other_value for root in self.roots])

    @property
    def patterns_read(self) -> list[tuple[int, Firing]]:
        """Attention weights that roots read, with their prompts."""
        return [(prompt, firing) for prompt, root in enumerate(self.roots) for firing in root.patterns]

    def mlp_at(self, layer: int, prompts: Int[Tensor, " place"], tokens: Int[Tensor, " place"]) -> MlpSecant:
        """The secant of a layer's MLP at some places, one row each."""
        if layer in self.kept_mlps:
            return self.kept_mlps[layer].at(prompts, tokens)
        run, other, model = self.recording, self.other, self.recording.model
        some, place = tokens.unique(return_inverse=True)
        if model.architecture.parallel(model.config):
            read = [each.residuals[layer][:, some] for each in (run, other)]
        else:
            read = [(each.residuals[layer + 1] - each.mlp_writes[layer])[:, some] for each in (run, other)]
        return MlpSecant.of(run, other, layer, (read[0], read[1]), some).at(prompts, place)

    # -- flow of components ----------------------------------------------------------------------------------

    def embedding(self) -> Float[Tensor, "batch token"]:
        """The flow from each token's embedding: the first cut, so they sum to ``J - J'``."""
        return ((self.recording.embedding - self.other.embedding) * self.residual[0]).sum(-1)

    def mlps(self) -> Float[Tensor, "layer batch token"]:
        """The flow of every MLP."""
        return ((self.recording.mlp_writes - self.other.mlp_writes) * self.residual[1:]).sum(-1)

    @torch.inference_mode()
    def heads(self, layer: int) -> HeadFlow:
        """The flow of every head component of a layer."""
        own, onto = self.layers[layer], self.onto[layer]
        read = own.forward(self.recording.residuals[layer] - self.other.residuals[layer])
        found = [
            own.flow(onto, rows, own.of_patterns(onto, rows, self.patterns_read), read)
            for rows in own.blocks()
        ]
        return HeadFlow(
            **{f.name: torch.cat([getattr(each, f.name) for each in found], dim=2) for f in fields(HeadFlow)}
        )

    def flow(self, prompt: int, site: Site) -> float:
        """The flow of one component at one place."""
        layer, dest = site.layer or 0, site.dest or 0
        if site.kind == "root":
            return self.roots[prompt].value - self.roots[prompt].other_value
        if site.kind == "embedding":
            return float(self.embedding()[prompt, dest])
        if site.kind == "mlp":
            writes = (
                self.recording.mlp_writes[layer, prompt, dest] - self.other.mlp_writes[layer, prompt, dest]
            )
            return float(writes @ self.residual[layer + 1, prompt, dest])
        if (
            site.kind == "rounding"
        ):  # of the residual that the layer leaves; what is rounded inside nodes is theirs
            left = self.writes_rounding
            return (
                0.0
                if left is None
                else float(left[layer, prompt, dest] @ self.residual[layer + 1, prompt, dest])
            )
        return sum(self._entering(prompt, site)[:2]) if site.kind == "head" else 0.0

    @torch.inference_mode()
    def _entering(self, prompt: int, site: Site) -> list[float]:
        """Moved, attends, value, query, key and rounding of one head component."""
        own, onto = self.layers[site.layer or 0], self.onto[site.layer or 0]
        layer, dest = site.layer or 0, site.dest or 0
        rows = own.rows(slice(dest, dest + 1))
        read = own.forward(self.recording.residuals[layer] - self.other.residuals[layer])
        found = own.flow(onto, rows, own.of_patterns(onto, rows, self.patterns_read), read)
        return [
            float(getattr(found, f.name)[prompt, site.head or 0, 0, site.src or 0]) for f in fields(found)
        ]

    def head_flow(self, prompt: int, site: Site) -> tuple[float, float]:
        """What one head component moves differently, and what it gives by attending differently."""
        return self.head_flows(prompt, [site])[0]

    @torch.inference_mode()
    def head_flows(self, prompt: int, sites: Sequence[Site]) -> list[tuple[float, float]]:
        """What head components move differently, and what they give by attending differently."""
        known = {site: self.strongest[prompt].get(site) for site in sites}
        missing: dict[int, list[Site]] = {}
        for site, found in known.items():
            if found is None:
                missing.setdefault(site.layer or 0, []).append(site)
        for layer, some in missing.items():
            own, (head, dest, src) = self.layers[layer], self._numbers(some)
            softmax, _ = own.row(prompt, head, dest)
            kv = head // self.recording.model.weights.group
            values = self.recording.values[layer], self.other.values[layer]
            moved = (values[0] - values[1])[prompt, kv, src] * self.onto[layer][prompt, head, dest]
            at = torch.arange(len(some), device=src.device), src
            both = (
                softmax.mean[at] * moved.sum(-1),
                softmax.difference[at] * self._pattern_multipliers(prompt, some),
            )
            pairs = zip(*(each.tolist() for each in both), strict=True)
            known |= dict(zip(some, pairs, strict=True))
        return [found for site in sites if (found := known[site]) is not None]

    def _numbers(self, sites: Sequence[Site]) -> list[Int[Tensor, " site"]]:
        """Head, destination and source of head components."""
        rows = [(site.head or 0, site.dest or 0, site.src or 0) for site in sites]
        return list(torch.tensor(rows, device=self.residual.device).unbind(1))

    @torch.inference_mode()
    def differences(self, prompt: int, sites: Sequence[Site]) -> Float[Tensor, "site d_model"]:
        """``D`` of what embeddings, MLPs and head components write at their places."""
        run, other = self.recording, self.other
        found = run.residuals.new_empty(len(sites), run.residuals.shape[-1])
        rows: dict[tuple[str, int], list[int]] = {}
        for row, site in enumerate(sites):
            layer = site.layer or 0
            rows.setdefault((site.kind, layer if site.kind == "head" else 0), []).append(row)
        for (kind, layer), some in rows.items():
            mine = [sites[row] for row in some]
            head, dest, src = self._numbers(mine)
            if kind == "embedding":
                found[some] = (run.embedding[prompt] - other.embedding[prompt])[dest]
            elif kind == "mlp":
                at = torch.tensor([site.layer or 0 for site in mine], device=dest.device), prompt, dest
                found[some] = run.mlp_writes[at] - other.mlp_writes[at]
            else:
                own, number = self.layers[layer], torch.arange(len(mine), device=dest.device)
                softmax, _ = own.row(prompt, head, dest)
                pair = [each.bare_values[layer][head, prompt, src] for each in (run, other)]
                mixed = softmax.mean[number, src, None] * (pair[0] - pair[1])
                mixed = mixed + softmax.difference[number, src, None] * (pair[0] + pair[1]) / 2
                write = (mixed[:, None] @ raw_weights(run.model).W_O[layer, head])[:, 0]
                found[some] = write if own.after is None else own.after.at(prompt, dest).forward(write)
        return found

    # -- edges -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def reads(self, prompt: int, site: Site, channels: Sequence[int] | None = None) -> list[FlowRead]:
        """The residuals that a head component, an MLP or the root reads, with the multiplier through that node.

        A head component reads its source (value), its destination (query) and every token that this sees (key); with
        ``channels``, only through those channels of its queries and keys.
        """
        model, layer, dest = self.recording.model, site.layer or 0, site.dest or 0
        if site.kind == "root":
            return [
                FlowRead("root", Place(prompt, read.position, read.layer), read.multiplier)
                for read in self.roots[prompt].residuals
            ]
        if site.kind == "mlp":
            place = Place(prompt, dest, layer, not model.architecture.parallel(model.config))
            return [FlowRead("input", place, self.through_mlp[layer, prompt, dest])]
        if site.kind != "head" or site.head is None or site.src is None:
            return []
        own, head, src = self.layers[layer], site.head, site.src
        query, keys, seen = self.of_scores(prompt, site)
        found: list[tuple[Side, Tensor, Tensor]] = []
        if channels is None:
            strength = own.row(prompt, head, dest)[0].mean[src]
            found.append(
                ("value", seen.new_tensor([src]), strength * self.onto[layer][prompt, head, dest][None])
            )
        else:
            to_query, to_key = self.bases(layer, head)
            query = (query @ to_key)[channels] @ to_query[:, channels].T
            keys = (keys @ to_query)[:, channels] @ to_key[:, channels].T
        found.append(("query", seen.new_tensor([dest]), query[None]))
        found.append(("key", seen, keys))
        result: list[FlowRead] = []
        for side, tokens, g in found:
            group = 1 if side == "query" else model.weights.group
            spread = g.new_zeros(len(tokens), model.n_heads // group, model.d_head)
            spread[:, head // group] = g
            pulled = own.back({side: spread}, (torch.full_like(tokens, prompt), tokens))
            result += [
                FlowRead(side, Place(prompt, token, layer), one)
                for token, one in zip(tokens.tolist(), pulled, strict=True)
            ]
        return result

    def of_scores(self, prompt: int, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Through one head component: the multiplier of its query, those of the keys it sees, and where these are."""
        found = self.score_multipliers(prompt, [site])
        seen = self.recording.visible[site.layer or 0][prompt, site.dest or 0].nonzero()[:, 0]
        return found.query[0], found.logits[0, seen, None] * found.queries[0], seen

    def score_multipliers(self, prompt: int, sites: Sequence[Site]) -> ScoreMultipliers:
        """Through head components of one layer: the multipliers of what their attention is computed from."""
        layer, (head, dest, src) = sites[0].layer or 0, self._numbers(sites)
        own = self.layers[layer]
        softmax, slope = own.row(prompt, head, dest)
        only = torch.zeros_like(softmax.mean)
        only[torch.arange(len(sites), device=src.device), src] = self._pattern_multipliers(prompt, sites)
        logits = softmax(only) * slope
        query = (logits[:, None] @ own.keys[prompt, head])[:, 0]
        return ScoreMultipliers(softmax.mean, logits, query, own.queries[prompt, head, dest])

    def _pattern_multipliers(self, prompt: int, sites: Sequence[Site]) -> Float[Tensor, " site"]:
        """The multipliers of attention weights of one layer: ``v~ . g``, and one more where the root reads the weight
        itself."""
        layer, (head, dest, src) = sites[0].layer or 0, self._numbers(sites)
        found = (self.layers[layer].values[prompt, head, src] * self.onto[layer][prompt, head, dest]).sum(-1)
        read = [firing.site for at, firing in self.patterns_read if at == prompt]
        return found + found.new_tensor([read.count(site) for site in sites]) if read else found

    def bases(
        self, layer: int, head: int | Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "*n d_head channel"], Float[Tensor, "*n d_head channel"]]:
        """From what a head's query and key read to their coefficients in its channels; of one head or of several."""
        channels = exact_channels(self.recording.model).at(layer, head)
        return channels.to_query.to(self.residual), channels.to_key.to(self.residual)

    def singular_values(self, layer: int, head: int | Int[Tensor, " n"]) -> Float[Tensor, "*n channel"]:
        """Of the channels that ``bases`` gives."""
        return exact_channels(self.recording.model).at(layer, head).singular_values.to(self.residual)

    @torch.inference_mode()
    def shares(self, reads: Sequence[FlowRead]) -> tuple[ComponentIndex, Float[Tensor, "read component"]]:
        """What every upstream component adds to each read of one prompt; biases, which do not differ, add nothing."""
        run, other, model = self.recording, self.other, self.recording.model
        places, g = [read.place for read in reads], torch.stack([read.multiplier for read in reads])
        prompt, top = places[0].prompt, max(place.attention_layers for place in places)
        length = max(place.position for place in places) + 1
        index = ComponentIndex.of(run, top, length)
        t = torch.tensor([place.position for place in places], device=g.device)
        b, layers = torch.full_like(t, prompt), torch.arange(top, device=g.device)
        mlps = (layers < layers.new_tensor([place.layer for place in places])[:, None]).to(g)
        attention = layers < layers.new_tensor([place.attention_layers for place in places])[:, None]
        shares = g.new_zeros(len(places), index.n_components)
        shares[:, 0] = ((run.embedding[b, t] - other.embedding[b, t]) * g).sum(-1)
        written = run.mlp_writes[:top, b, t] - other.mlp_writes[:top, b, t]
        shares[:, index.mlps] = (written * g).sum(-1).T * mlps
        if self.writes_rounding is not None:
            shares[:, index.roundings] = (self.writes_rounding[:top, b, t] * g).sum(-1).T * mlps
        if top == 0:
            return index, shares
        heads = shares[:, index.n_non_head :].unflatten(1, (top, model.n_heads, length))
        patterns = [each.attention.rows(top, b, t, length) for each in (run, other)]
        mean, difference = (patterns[0] + patterns[1]) / 2, patterns[0] - patterns[1]
        for layer in range(top):
            after = self.layers[layer].after
            written = g if after is None else after.at(b, t).back(g)
            onto = torch.einsum("nd,hrd->nhr", written, raw_weights(model).W_O[layer])
            values = [each.bare_values[layer][:, prompt, :length] for each in (run, other)]
            moved = torch.einsum("hsr,nhr->nhs", values[0] - values[1], onto)
            there = torch.einsum("hsr,nhr->nhs", (values[0] + values[1]) / 2, onto)
            found = mean[:, layer] * moved + difference[:, layer] * there
            heads[:, layer] = found * attention[:, layer, None, None]
        return index, shares

    @torch.inference_mode()
    def edges(
        self,
        prompt: int,
        site: Site,
        *,
        channels: Sequence[int] | None = None,
        strongest: int = STRONGEST,
    ) -> list[FlowEdge]:
        """What flows into a node from every component that it reads: the strongest of each residual, largest first.

        All of them together are the node's flow (`IdentityError` if they are not), but for ``channels``, which ask for
        a part of it.
        """
        reads = self.reads(prompt, site, channels)
        found: list[FlowEdge] = []
        total = size = 0.0
        if site.kind == "root":
            for firing in self.roots[prompt].patterns:
                ends = [
                    float(run.attention.at(firing.layer, prompt, firing.head, firing.dest, firing.src))
                    for run in (self.recording, self.other)
                ]
                found.append(FlowEdge(firing.site, site, "root", ends[0] - ends[1]))
            total = sum(edge.flow for edge in found)
        model = self.recording.model
        width = (model.n_layers * model.n_heads * self.recording.lengths[prompt]) or 1
        step = max(1, SHARES_AT_ONCE // width)
        for first in range(0, len(reads), step):
            some = reads[first : first + step]
            index, shares = self.shares(some)
            total, size = total + float(shares.sum()), size + float(shares.abs().sum())
            largest = shares.abs().topk(min(strongest, shares.shape[1]), dim=1).indices
            for read, numbers, row in zip(some, largest.tolist(), shares, strict=True):
                found += [
                    FlowEdge(index.component(n).at(read.place.position), site, read.side, float(row[n]))
                    for n in numbers
                    if row[n] != 0
                ]
        if channels is None and site.kind in ("root", "mlp", "head"):
            self._conserve(prompt, site, total, size)
        return sorted(found, key=lambda edge: (-abs(edge.flow), edge.source, edge.side))

    def _conserve(self, prompt: int, site: Site, entering: float, size: float) -> None:
        """What flows into a node must be what flows out of it; in half precision, but for what rounding does in it."""
        whole, root = self.flow(prompt, site), self.roots[prompt]
        if self.recording.model.half:
            if site.kind == "head":
                entering += self._entering(prompt, site)[-1]
            elif site.kind == "root":
                entering += float(self.rounding[-1, prompt].sum())
            else:
                return  # checked with the rounding of the whole layer
        size = max(
            size, abs(whole), root.size if site.kind == "root" else 1e-3 * abs(root.value - root.other_value)
        )
        error, allowed = abs(entering - whole) / max(size, 1e-30), tolerance_for(self.recording.model.dtype)
        if not error <= allowed:
            raise IdentityError(
                f"What flows into {site} (prompt {prompt}) sums to {entering:.6g}, but its flow is {whole:.6g}: "
                f"relative error {error:.1e}, allowed {allowed:.0e}."
            )
