"""Difference flow: what changed a root between two runs, shared exactly among all components.

Two prompts of equal length are recorded; every operation between the tokens and the root has a secant that is exact
for the pair (`headtrace.tracing.secants`). One backward sweep through them gives a multiplier g wherever something is
written, and at every cut of the network ``J - J' = sum over components of D o_c . g_c``. What is the same in both runs
has no flow: biases, sinks and constants drop out.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> prompts = ["When Mary and John went to the store, John gave a drink to",
...            "When Mary and John went to the store, Mary gave a drink to"]
>>> clean, other = (model.record(prompt, keep=DIFFERENCE_FIELDS) for prompt in prompts)
>>> root = headtrace.roots.LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
>>> flow = difference_flow(clean, other, root)
>>> change = float(flow.value - flow.other_value)
>>> bool(abs(float(flow.embedding().sum()) - change) < 1e-4 * abs(change))
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.errors import IdentityError, InputError
from headtrace.models.attention import softcap
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.models.identities import tolerance_for
from headtrace.models.weights import norm_eps
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.tracing.attribute_root import Place, ReadPoint
from headtrace.tracing.components import ComponentIndex
from headtrace.tracing.secants import (
    AttentionSecant,
    HeadFlow,
    MlpSecant,
    NormSecant,
    SoftmaxSecant,
    raw_weights,
    softcap_slope,
)
from headtrace.vocabulary import Firing, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

DIFFERENCE_FIELDS = CONTENT_FIELDS
"""What both recordings must keep."""
SHARES_AT_ONCE = 16_000_000
"""Flows of upstream components that are computed at once (64 MB in float32)."""
STRONGEST = 128
"""Edges that are kept of each residual that a node reads, unless another number is given."""


# -- roots ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualRead:
    """A residual that a root reads: before a layer, or before the final norm."""

    layer: int
    position: int
    multiplier: Float[Tensor, " d_model"]


@dataclass(frozen=True)
class RootDifference:
    """A root in two runs: its values and what it reads."""

    value: float
    other_value: float
    size: float
    """The largest numbers that the values are added up from."""
    residuals: tuple[ResidualRead, ...] = ()
    patterns: tuple[Firing, ...] = ()
    """Attention weights that the root adds up."""


def root_difference(root: Root, recording: Recording, other: Recording, prompt: int = 0) -> RootDifference:
    """The values of a root in both runs, and the multipliers of what it reads."""
    if isinstance(root, Heads):
        firings = root.firings(recording, prompt)
        values = [
            sum(float(run.attention.at(f.layer, prompt, f.head, f.dest, f.src)) for f in firings)
            for run in (recording, other)
        ]
        return RootDifference(*values, size=float(len(firings)), patterns=tuple(firings))
    if isinstance(root, Direction):
        (reading,) = root.readings(recording, prompt, 1)
        point, vector = reading.point, reading.direction
        ends = [run.residuals[point.layer, prompt, point.position] for run in (recording, other)]
        size = max(float(x.norm() * vector.norm()) for x in ends)
        read = ResidualRead(point.layer, point.position, vector)
        return RootDifference(*(float(x @ vector) for x in ends), size=size, residuals=(read,))
    n, tail = recording.lengths[prompt], len(root.answer_prefix)
    if not torch.equal(recording.token_ids[prompt, n - tail : n], other.token_ids[prompt, n - tail : n]):
        raise InputError("Both prompts must end with the same tokens of the answer, all but its last one.")
    if isinstance(root, LogitDifference):
        weights = recording.logits.new_zeros(recording.model.d_output)
        for ids, sign in ((root.answer, 1.0), (root.wrong, -1.0)):
            chosen = list(range(len(weights)) if ids is None else ids)
            index = torch.tensor(chosen, device=weights.device)
            weights.index_add_(0, index, weights.new_full((len(chosen),), sign / len(chosen)))
        return _of_logits(recording, other, prompt, [(recording.lengths[prompt] - 1, weights)], logs=False)
    assert isinstance(root, Likelihood)
    readings = root.readings(recording, prompt, 1)
    places = [(reading.point.position, reading.detail[0].q) for reading in readings]
    return _of_logits(recording, other, prompt, places, logs=True)


def _of_logits(
    recording: Recording,
    other: Recording,
    prompt: int,
    places: Sequence[tuple[int, Float[Tensor, " vocab"]]],
    *,
    logs: bool,
) -> RootDifference:
    """A weighted sum of output logits, or of log-probabilities, at some positions."""
    model, weights, pair = recording.model, recording.model.weights, (recording, other)
    facts = model.architecture
    final = None if facts.final_norm is None else model.hf.get_submodule(facts.final_norm)
    values, size, reads = [0.0, 0.0], 0.0, list[ResidualRead]()
    for position, of_token in places:
        points = [ReadPoint.final(run, prompt, position) for run in pair]
        if logs or model.final_softcap is not None:
            z = [p.logits_of(p.residual[None])[0] + weights.output_bias for p in points]
            g = of_token
            if logs:
                g = SoftmaxSecant.of([softcap(each, model.final_softcap) for each in z]).of_log(of_token)
            onto = (g * softcap_slope(z, model.final_softcap)) @ weights.W_U
        else:  # linear: only the tokens that are asked about
            some = of_token.nonzero()[:, 0]
            onto = of_token[some] @ weights.W_U[some]
        if final is None:
            onto = onto * weights.final_gain
        else:
            ends = [point.residual for point in points]
            onto = NormSecant.of(ends, norm_eps(final), facts.norm, weights.final_gain).back(onto)
        reads.append(ResidualRead(model.n_layers, position, onto))
        for i, run in enumerate(pair):
            logits = run.logits_at(prompt, position)
            size = max(size, float(logits.abs().max()))
            values[i] += float((logits.log_softmax(-1) if logs else logits) @ of_token)
    return RootDifference(values[0], values[1], size * len(places), tuple(reads))


def logit_multiplier(flow: DifferenceFlow, prompt: int, ids: Sequence[int]) -> Float[Tensor, " d_model"]:
    """The multiplier of the final residual at the last position for the mean logit of some tokens."""
    weights = flow.recording.logits.new_zeros(flow.recording.model.d_output)
    weights[list(ids)] = 1 / len(ids)
    places = [(flow.recording.lengths[prompt] - 1, weights)]
    return _of_logits(flow.recording, flow.other, prompt, places, logs=False).residuals[0].multiplier


# -- the sweep -----------------------------------------------------------------------------------------------


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
class ChannelFlow:
    """What enters a head component through each channel of its head's queries, or of its keys."""

    channels: Float[Tensor, " channel"]
    remainder: float
    """What a head of lower rank reads outside all its channels."""


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
        found = self.strongest[prompt].get(site)
        if found is None:
            layer, head, dest, src = site.layer or 0, site.head or 0, site.dest or 0, site.src or 0
            own, kv = self.layers[layer], head // self.recording.model.weights.group
            softmax, _ = own.row(prompt, head, dest)
            values = self.recording.values[layer], self.other.values[layer]
            moved = (values[0] - values[1])[prompt, kv, src] @ self.onto[layer][prompt, head, dest]
            attends = self.pattern_multiplier(prompt, site) * softmax.difference[src]
            found = float(softmax.mean[src] * moved), float(attends)
        return found

    def differences(self, prompt: int, sites: Sequence[Site]) -> Float[Tensor, "site d_model"]:
        """``D`` of what components write at their places."""
        run, other = self.recording, self.other
        found: list[Tensor] = []
        for site in sites:
            layer, dest = site.layer or 0, site.dest or 0
            if site.kind == "embedding":
                found.append(run.embedding[prompt, dest] - other.embedding[prompt, dest])
            elif site.kind == "mlp":
                found.append(run.mlp_writes[layer, prompt, dest] - other.mlp_writes[layer, prompt, dest])
            else:
                head, src, own = site.head or 0, site.src or 0, self.layers[layer]
                softmax, _ = own.row(prompt, head, dest)
                pair = [each.bare_values[layer][head, prompt, src] for each in (run, other)]
                mixed = softmax.mean[src] * (pair[0] - pair[1])
                mixed = mixed + softmax.difference[src] * (pair[0] + pair[1]) / 2
                write = mixed @ raw_weights(run.model).W_O[layer, head]
                found.append(write if own.after is None else own.after.at(prompt, dest).forward(write))
        return torch.stack(found)

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
        layer, head, dest, src = site.layer or 0, site.head or 0, site.dest or 0, site.src or 0
        own = self.layers[layer]
        softmax, slope = own.row(prompt, head, dest)
        only = torch.zeros_like(softmax.mean)
        only[src] = self.pattern_multiplier(prompt, site)
        logits = softmax(only) * slope
        seen = self.recording.visible[layer][prompt, dest].nonzero()[:, 0]
        query = logits @ own.keys[prompt, head]
        return query, logits[seen, None] * own.queries[prompt, head, dest], seen

    def pattern_multiplier(self, prompt: int, site: Site) -> Float[Tensor, ""]:
        """The multiplier of one attention weight: ``v~ . g``, and one more where the root reads the weight itself."""
        layer, head, dest, src = site.layer or 0, site.head or 0, site.dest or 0, site.src or 0
        found = self.layers[layer].values[prompt, head, src] @ self.onto[layer][prompt, head, dest]
        read = sum(at == prompt and firing.site == site for at, firing in self.patterns_read)
        return found + read

    def bases(
        self, layer: int, head: int
    ) -> tuple[Float[Tensor, "d_head channel"], Float[Tensor, "d_head channel"]]:
        """From what a head's query and key read to their coefficients in its channels."""
        channels = exact_channels(self.recording.model).at(layer, head)
        return channels.to_query.to(self.residual), channels.to_key.to(self.residual)

    def singular_values(self, layer: int, head: int) -> Float[Tensor, " channel"]:
        """Of the channels that ``bases`` gives."""
        return exact_channels(self.recording.model).at(layer, head).singular_values.to(self.residual)

    @torch.inference_mode()
    def channel_flow(self, prompt: int, site: Site, side: Literal["query", "key"]) -> ChannelFlow:
        """What enters a head component through each channel: linear, so the channels and the remainder sum to it."""
        layer, head, dest = site.layer or 0, site.head or 0, site.dest or 0
        own, group = self.layers[layer], self.recording.model.weights.group
        dq, dk, _ = own.forward(self.recording.residuals[layer] - self.other.residuals[layer])
        query, keys, seen = self.of_scores(prompt, site)
        to_query, to_key = self.bases(layer, head)
        if side == "query":
            mine, whole = (
                (query @ to_key) * (dq[prompt, head, dest] @ to_query),
                query @ dq[prompt, head, dest],
            )
        else:
            moved = dk[prompt, head // group, seen]
            mine, whole = ((keys @ to_query) * (moved @ to_key)).sum(0), (keys * moved).sum()
        return ChannelFlow(mine, float(whole - mine.sum()))

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


@torch.inference_mode()
def difference_flow(recording: Recording, other: Recording, root: Root | Sequence[Root]) -> DifferenceFlow:
    """How the difference of a root between two runs flows through the model, by one backward sweep.

    Both recordings are of prompts of equal lengths, made with ``keep=DIFFERENCE_FIELDS``; ``root`` is one root, or one
    for each pair of prompts. The identity is checked at the embeddings and behind every attention and MLP, the
    conservation at every head component and MLP: an `IdentityError` says where it fails.
    """
    roots = list(root) if isinstance(root, Sequence) else [root] * len(recording)
    _require_pair(recording, other, len(roots))
    if recording.model.half:
        for run in (recording, other):
            _refuse_more_than_rounding(run)
    with recording.model.assume_weights_unchanged():
        read = tuple(root_difference(each, recording, other, i) for i, each in enumerate(roots))
        return _Sweep(recording, other, read).run()


def _require_pair(recording: Recording, other: Recording, n_roots: int) -> None:
    if recording.model is not other.model:
        raise InputError("The two recordings are of different models.")
    if recording.lengths != other.lengths:
        raise InputError(
            f"Difference flow compares prompts of equal length: {recording.lengths} and {other.lengths} tokens."
        )
    if n_roots != len(recording):
        raise InputError(f"There are {n_roots} roots for {len(recording)} pairs of prompts.")


def _refuse_more_than_rounding(recording: Recording) -> None:
    """A recording checks the sizes of its rounding parts when it computes them."""
    _ = recording.roundings
    for layer in range(recording.model.n_layers):
        recording.reading_roundings(layer)
        recording.value_roundings(layer)


class _Sweep:
    """The backward sweep, and its checks at every cut and every node."""

    def __init__(self, recording: Recording, other: Recording, roots: tuple[RootDifference, ...]) -> None:
        self.recording, self.other, self.roots = recording, other, roots
        model, residuals = recording.model, recording.residuals
        self.allowed, self.error = tolerance_for(model.dtype), 0.0
        self.strongest = [dict[Site, tuple[float, float]]() for _ in roots]
        self.residual = torch.zeros_like(residuals)
        self.rounding = residuals.new_zeros(residuals.shape[:-1])
        self.patterns = [(prompt, firing) for prompt, root in enumerate(roots) for firing in root.patterns]
        # By layer and prompt, D of what roots read of the residual before the layer, and of its patterns.
        self.of_residuals, self.of_patterns = residuals.new_zeros(2, len(residuals), len(recording))
        self.size = residuals.new_tensor([root.size for root in roots])
        for prompt, root in enumerate(roots):
            for read in root.residuals:
                self.residual[read.layer, prompt, read.position] += read.multiplier
            if root.residuals:
                self.of_residuals[root.residuals[0].layer, prompt] += root.value - root.other_value
        for prompt, f in self.patterns:
            ends = [run.attention.at(f.layer, prompt, f.head, f.dest, f.src) for run in (recording, other)]
            self.of_patterns[f.layer, prompt] += ends[0] - ends[1]

    def run(self) -> DifferenceFlow:
        model, run, other = self.recording.model, self.recording, self.other
        parallel, n = model.architecture.parallel(model.config), model.n_layers
        attention, through = (torch.empty_like(run.mlp_writes) for _ in range(2))
        onto, layers = torch.empty_like(run.queries), list[AttentionSecant]()
        left = torch.empty_like(run.mlp_writes) if model.half else None
        if model.half:
            self._round_logits()
        self._cut(n, "before the final norm", run.residuals[n] - other.residuals[n], self.residual[n])
        for layer in reversed(range(n)):
            g, ends = self.residual[layer + 1], (run.residuals[layer], other.residuals[layer])
            own, writes = AttentionSecant.of(run, other, layer)
            read = ends if parallel else (ends[0] + writes[0], ends[1] + writes[1])
            mlp = MlpSecant.of(run, other, layer, read)
            through[layer], behind = mlp.back(g)
            attention[layer] = g if parallel else g + through[layer]
            onto[layer] = own.onto_heads(attention[layer])
            dx, written = ends[0] - ends[1], run.mlp_writes[layer] - other.mlp_writes[layer]
            if left is not None:
                left[layer] = run.residuals[layer + 1] - other.residuals[layer + 1] - dx - written
                left[layer] -= writes[0] - writes[1]
                self.rounding[layer] += (left[layer] * g).sum(-1)
                assert mlp.writes is not None
                self.rounding[layer] += ((written - mlp.writes) * g).sum(-1)
                moved = read[0] - read[1]
                normed = moved if mlp.before is None else mlp.before.forward(moved)
                self.rounding[layer] += ((mlp.inputs - normed) * behind).sum(-1)
            else:
                largest = torch.maximum(run.mlp_writes[layer].abs(), other.mlp_writes[layer].abs())
                self._conserve_mlp(
                    layer, written * g, (read[0] - read[1]) * through[layer], largest * g.abs()
                )
            total, size, down, rounding = self._attention(own, onto[layer], dx)
            self.residual[layer] += g + through[layer] + down
            self._cut(layer, f"behind the attention of layer {layer}", dx, g + through[layer], (total, size))
            self.rounding[layer] += rounding  # until here it was inside the heads' own flow
            self._cut(layer, f"at layer {layer}", dx, self.residual[layer])
            layers.append(own)
        return DifferenceFlow(
            run,
            other,
            self.roots,
            tuple(reversed(layers)),
            self.residual,
            attention,
            through,
            onto,
            self.rounding,
            left,
            self.error,
            tuple(self.strongest),
        )

    def _keep_strongest(self, layer: int, first: int, found: HeadFlow) -> None:
        """Remember the head components of a layer, from some destination on, with the largest flows."""
        flows, shape = found.flow.flatten(1), found.flow.shape[1:]
        places = flows.abs().topk(min(STRONGEST, flows.shape[1])).indices
        parts = torch.stack((found.moved.flatten(1), found.attends.flatten(1)), dim=-1)
        for mine, row, both in zip(self.strongest, places, parts, strict=True):
            heads, dests, sources = (each.tolist() for each in torch.unravel_index(row, shape))
            for head, dest, src, (moved, attends) in zip(
                heads, dests, sources, both[row].tolist(), strict=True
            ):
                if moved or attends:
                    mine[Site("head", layer, head, first + dest, src)] = moved, attends

    def _round_logits(self) -> None:
        """What rounding did to the output logits, at the position where they are read first."""
        for prompt, root in enumerate(self.roots):
            final = [read for read in root.residuals if read.layer == self.recording.model.n_layers]
            if final:
                ends = [run.residuals[-1, prompt] for run in (self.recording, self.other)]
                computed = sum(float((ends[0] - ends[1])[r.position] @ r.multiplier) for r in final)
                self.rounding[-1, prompt, final[0].position] = root.value - root.other_value - computed

    def _attention(
        self, own: AttentionSecant, onto: Tensor, dx: Tensor
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"], Tensor, Float[Tensor, "batch token"]]:
        """Back through a layer's attention: the sums of its heads' flows and of their magnitudes, the multiplier of
        the residual that it reads, and what rounding adds to queries, keys and values."""
        read = own.forward(dx)
        queries, keys, values = (
            torch.empty_like(own.queries),
            *(torch.zeros_like(own.queries) for _ in range(2)),
        )
        total = size = dx.new_zeros(len(dx))
        for rows in own.blocks():
            patterns = own.of_patterns(onto, rows, self.patterns)
            queries[:, :, rows.some], more_keys, more_values = own.pulled(onto, rows, patterns)
            keys, values = keys + more_keys, values + more_values
            found = own.flow(onto, rows, patterns, read)
            entering = found.value + found.query + found.key + found.rounding
            sizes = (
                found.value.abs() + found.query.abs() + found.key.abs() + (patterns * rows.softmax.mean).abs()
            )
            self._conserve_heads(own.layer, found.flow - entering, sizes.sum(-1, keepdim=True))
            self._keep_strongest(own.layer, rows.some.start, found)
            total = total + found.flow.sum((1, 2, 3))
            size = size + (found.moved.abs() + found.attends.abs()).sum((1, 2, 3))
        keys, values = (
            x.unflatten(1, (-1, self.recording.model.weights.group)).sum(2) for x in (keys, values)
        )
        rounding = torch.zeros_like(self.rounding[0])
        if self.recording.model.half:
            for g, recorded, made in zip((queries, keys, values), own.recorded(), read, strict=True):
                rounding += ((recorded - made) * g).sum((1, 3))
        sides: dict[Side, Tensor] = {"query": queries, "key": keys, "value": values}
        down = own.back({side: g.transpose(1, 2) for side, g in sides.items()})
        return total, size, down, rounding

    def _cut(
        self,
        layer: int,
        where: str,
        dx: Tensor,
        g: Tensor,
        heads: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """All that crosses a cut, and what rounding adds behind it, sums to what the roots read behind it.

        ``heads``, of a cut behind attention: the sums of the heads' flows and of their magnitudes.
        """
        product = dx * g
        found, size = product.sum((1, 2)) + self.rounding[layer:].sum((0, 2)), product.abs().sum((1, 2))
        expected = self.of_patterns[layer:].sum(0) + self.of_residuals[layer + (heads is not None) :].sum(0)
        if heads is not None:
            found, size = found + heads[0], size + heads[1]
        self._require(found - expected, torch.maximum(size, self.size), f"The flows {where}")

    def _conserve_mlp(self, layer: int, out: Tensor, into: Tensor, subtracted: Tensor) -> None:
        """``subtracted``: the larger of the two flows whose difference is ``out``. Where runs differ by the last digit
        only, what is left of them is rounding, and no part of it must be conserved."""
        size = (out.abs() + into.abs()).sum(-1) + self._rounding_of_root()[:, None]
        size = size + 16 * torch.finfo(out.dtype).eps / self.allowed * subtracted.sum(-1)
        self._require(
            out.sum(-1) - into.sum(-1),
            size + 1e-3 * size.amax(),
            f"The flows through the MLP of layer {layer}",
        )

    def _conserve_heads(self, layer: int, left: Tensor, size: Tensor) -> None:
        size = size + self._rounding_of_root()[:, None, None, None]
        self._require(left, size + 1e-3 * size.amax(), f"The flows through heads of layer {layer}")

    def _rounding_of_root(self) -> Float[Tensor, " batch"]:
        """A node that carries nothing but the last digits of numbers as large as the root's need not conserve them."""
        return 16 * torch.finfo(self.size.dtype).eps / self.allowed * self.size

    def _require(self, left: Tensor, size: Tensor, what: str) -> None:
        errors = torch.nan_to_num(left.abs() / size.clamp_min(1e-30), nan=torch.inf)
        error = float(errors.max())
        self.error = max(self.error, error)
        if not error <= self.allowed:
            place = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
            raise IdentityError(
                f"{what} do not add up: relative error {error:.1e} (allowed {self.allowed:.0e}) in prompt {place[0]}."
            )
