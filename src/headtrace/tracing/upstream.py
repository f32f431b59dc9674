"""What upstream components contribute to the queries and keys of one layer's heads.

A head component (u, h, j) writes ``A_h[t, j] v_h[j] W_O`` at token t: apart from one number per token it is a
single vector, so all its readings by a downstream head are ``v_h[j] W_O W`` with W the head's folded W_Q or W_K
(`headtrace.tracing.composing`).

Components of a layer are numbered: embedding, mlp 0.., attention_bias 0.. where the model has such biases, offset, in
half precision rounding 0.. and what rounding did in the layer itself while it read (the *plain* ones), then heads by
layer, head and source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.progress import count
from headtrace.tracing.causes import Causes
from headtrace.tracing.composing import Composer
from headtrace.tracing.readings import Readings
from headtrace.vocabulary import AttentionSide, Component, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

CANDIDATES_AT_ONCE = 3_000_000
"""Firings are traced together as long as their candidates number at most this many (12 MB in float32)."""
SHORT = 128
"""Prompts of at most this many tokens are short: composed weights are larger than attention patterns."""
LONG_GROUP, LONG_CANDIDATES = 3, 48_000_000
"""Firings of long prompts share the reading of attention patterns: up to three at a time, within 192 MB."""


@dataclass(frozen=True)
class Catalogue:
    """Numbers for the components upstream of a layer."""

    layer: int
    n_heads: int
    length: int
    rounded: bool = False
    """Whether the model runs in half precision, so that rounding is a component, too."""
    biased: bool = True
    """Whether attention writes biases."""

    @classmethod
    def of(cls, model: Model, layer: int, length: int) -> Catalogue:
        return cls(layer, model.n_heads, length, model.half, model.weights.has_attention_bias)

    @cached_property
    def n_plain(self) -> int:
        return self.offset + 1 + (self.layer + 1 if self.rounded else 0)

    @property
    def biases(self) -> slice:
        """The numbers of attention biases, layer by layer."""
        return slice(self.layer + 1, self.offset)

    @cached_property
    def offset(self) -> int:
        """The number of the reader's own bias."""
        return 1 + self.layer * (2 if self.biased else 1)

    @property
    def roundings(self) -> slice:
        """The numbers of what rounding added to the residual, layer by layer (the layer's own comes after them)."""
        return slice(self.offset + 1, self.offset + 1 + self.layer)

    def is_own(self, number: int) -> bool:
        """Whether a component is the reader's: its bias, or what rounding did while it read."""
        return number == self.offset or (self.rounded and number == self.n_plain - 1)

    @cached_property
    def n_components(self) -> int:
        return self.n_plain + self.layer * self.n_heads * self.length

    def is_below(self, number: int, layer: int) -> bool:
        """Whether a component is there when a layer reads: written below it, or the reader's own."""
        return number == 0 or self.is_own(number) or self._layer(number) < layer

    def _layer(self, number: int) -> int:
        """The layer of a component that has one."""
        if number >= self.n_plain:
            return (number - self.n_plain) // (self.length * self.n_heads)
        return (number - 1) % self.layer if number < self.offset else number - self.roundings.start

    def component(self, number: int, reader: Site | None = None) -> Component:
        """The component behind a number; ``reader`` is the firing that reads it, whose own bias an offset is."""
        l = self.layer
        if number == 0:
            return Component("embedding")
        if number <= l:
            return Component("mlp", number - 1)
        if number < self.offset:
            return Component("attention_bias", number - 1 - l)
        if number == self.offset:
            return Component("offset") if reader is None else Component("offset", reader.layer, reader.head)
        if number < self.n_plain:
            own = number == self.n_plain - 1
            rounding = number - self.roundings.start
            return Component("rounding", rounding if not own or reader is None else reader.layer)
        rest, src = divmod(number - self.n_plain, self.length)
        upstream, which = divmod(rest, self.n_heads)
        return Component("head", upstream, which, src)

    def number(self, component: Component) -> int | None:
        """The number of a component; None for one that is not upstream of the layer.

        >>> catalogue = Catalogue(layer=3, n_heads=4, length=5)
        >>> all(catalogue.number(catalogue.component(n)) == n for n in range(catalogue.n_components))
        True
        >>> bare = Catalogue(layer=3, n_heads=4, length=5, biased=False)
        >>> all(bare.number(bare.component(n)) == n for n in range(bare.n_components))
        True
        >>> rounded = Catalogue(layer=3, n_heads=4, length=5, rounded=True)
        >>> all(rounded.number(rounded.component(n)) == n for n in range(rounded.n_components))
        True
        >>> [rounded.is_below(number, 1) for number in range(13)]  # embedding, MLPs, biases, offset, roundings
        [True, True, False, False, True, False, False, True, True, False, False, True, True]
        """
        l, layer = self.layer, component.layer
        if component.kind == "embedding":
            return 0
        if component.kind == "offset":
            return self.offset
        if component.kind == "rounding":
            known = self.rounded and layer is not None and 0 <= layer <= l
            return self.roundings.start + layer if known else None
        if layer is None or not 0 <= layer < l:
            return None
        if component.kind == "mlp":
            return 1 + layer
        if component.kind == "attention_bias":
            return self.biases.start + layer if self.biased else None
        head, src = component.head, component.src
        if head is None or src is None or head >= self.n_heads or src >= self.length:
            return None
        return self.n_plain + (layer * self.n_heads + head) * self.length + src


@dataclass(frozen=True)
class Firings:
    """Firings of one or many prompts and layers: as sites, and as index tensors."""

    sites: Sequence[tuple[int, Site]]
    """Prompt and site of each row."""
    layer: Int[Tensor, " firing"]
    prompt: Int[Tensor, " firing"]
    head: Int[Tensor, " firing"]
    dest: Int[Tensor, " firing"]
    src: Int[Tensor, " firing"]

    @classmethod
    def of(cls, sites: Sequence[tuple[int, Site]], device: torch.device) -> Firings:
        """Firings from sites of heads, each with the number of its prompt."""
        rows = torch.tensor([(s.layer, p, s.head, s.dest, s.src) for p, s in sites], device=device)
        return cls(sites, *rows.unbind(dim=1))

    @property
    def top(self) -> int:
        """The highest layer among them."""
        return max(site.layer or 0 for _, site in self.sites)

    def __len__(self) -> int:
        return len(self.sites)


@dataclass(frozen=True)
class Upstream:
    """The components upstream of some firings in a recording, read by their heads with all scales frozen.

    Firings of several layers go together: what is not below a firing's own layer counts as zero for it.
    """

    recording: Recording
    composer: Composer
    layer: int
    """The highest layer that is read at: components below it have a number."""
    length: int
    """Tokens that matter: nothing after the last destination is visible to any firing."""

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue.of(self.recording.model, self.layer, self.length)

    def readings(
        self, side: AttentionSide, firings: Firings, strength: Float[Tensor, "firing head_up src"]
    ) -> Readings:
        """Every upstream head's value vectors as read by each firing's head, reader by reader for all its prompts;
        ``strength`` is what they are written with where the firing reads."""
        group = 1 if side == "query" else self.recording.model.weights.group
        asked = [((site.layer or 0, (site.head or 0) // group), prompt) for prompt, site in firings.sites]
        values = self.recording.shared_values[: self.layer, ..., : self.length, :].flatten(0, 1)
        return Readings.of(self.composer, side, values, asked, strength)

    def pattern_rows(
        self, firings: Firings, token: Int[Tensor, " firing"]
    ) -> Float[Tensor, "firing head_up src"]:
        """How strongly every upstream head component writes at one token per firing (over post-norm scales)."""
        rec, b = self.recording, firings.prompt
        rows = rec.attention.rows(self.layer, b, token, self.length)
        if rec.post_norm_scales is not None:
            rows = rows / rec.post_norm_scales[: self.layer, b, token].T[:, :, None, None]
        return rows.flatten(1, 2)

    def pattern_columns(
        self, prompt: Int[Tensor, " active"], head_up: Int[Tensor, "active n"], src: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """How strongly some head components write at every token."""
        rec, n_heads = self.recording, self.recording.model.n_heads
        layer, head, p = head_up // n_heads, head_up % n_heads, prompt[:, None]
        columns = rec.attention.columns(layer, p, head, src, self.length)
        if rec.post_norm_scales is not None:
            columns = columns / rec.post_norm_scales[layer, p, : self.length]
        return columns

    def attended(
        self, firings: Firings, weight: Float[Tensor, "firing token"]
    ) -> Float[Tensor, "firing head_up src"]:
        """At least ``sum over t of weight[t] A_h[t, j]`` for every upstream head h and source j: that sum where
        patterns are kept, in one product per prompt."""
        rec, l, n = self.recording, self.layer, self.length
        out = weight.new_empty(len(firings), l, rec.model.n_heads, n)
        rows_of: dict[int, list[int]] = {}
        for row, (prompt, _) in enumerate(firings.sites):
            rows_of.setdefault(prompt, []).append(row)
        for prompt, mine in rows_of.items():
            rows = weight if len(mine) == len(weight) else weight[mine]
            if rec.post_norm_scales is not None:
                rows = (rows / rec.post_norm_scales[:l, prompt, None, :n])[:, None]
            out[mine] = rec.attention.reach(l, prompt, rows).permute(2, 0, 1, 3)
        return out.flatten(1, 2)

    def _below(self, firings: Firings) -> Float[Tensor, "firing layer"]:
        """One for every layer below a firing's own, zero for the others."""
        return (torch.arange(self.layer, device=firings.layer.device) < firings.layer[:, None]).to(
            self.recording.model.dtype
        )

    def plain_queries(self, firings: Firings) -> Float[Tensor, "firing plain d_head"]:
        """Plain components' parts of each firing's query, before QK-norm and rotary positions; what rounding did while
        the query was read is not among them (`reading_queries`)."""
        rec, weights, l = self.recording, self.recording.model.weights, self.layer
        b, d = firings.prompt, firings.dest
        below = self._below(firings)
        writes, scale = [_plain_at(rec, l + 1, b, d)], [below.new_ones(len(firings), 1), below]
        if weights.has_attention_bias:
            bias = weights.attention_bias[:l].expand(len(firings), -1, -1)
            if rec.post_norm_scales is not None:
                bias = bias / rec.post_norm_scales[:l, b, d].T[..., None]
            writes.append(bias)
            scale.append(below)
        if rec.model.half:
            writes.append(rec.roundings[:l, b, d].transpose(0, 1))
            scale.append(below)
        times = torch.cat(scale, dim=1) / rec.norm_scales[firings.layer, b, d][:, None]
        written = torch.cat(writes, dim=1) * times[..., None]
        reader = firings.layer * rec.model.n_heads + firings.head
        queries = written @ weights.W_Q.flatten(0, 1).index_select(0, reader)
        offset = weights.b_Q.flatten(0, 1)[reader][:, None]
        place = self.catalogue.offset
        return torch.cat((queries[:, :place], offset, queries[:, place:]), dim=1)

    def reading_queries(self, firings: Firings) -> Float[Tensor, "firing d_head"]:
        """What rounding did to each firing's query while it was read, as the head has it."""
        found = [
            self.recording.reading_roundings(site.layer or 0)[0][prompt, site.head, site.dest]
            for prompt, site in firings.sites
        ]
        return torch.stack(found)

    def reading_keys(self, firings: Firings) -> Float[Tensor, "firing token d_head"]:
        """The same for every key that each firing's head sees."""
        group = self.recording.model.weights.group
        found = [
            self.recording.reading_roundings(site.layer or 0)[1][prompt, (site.head or 0) // group]
            for prompt, site in firings.sites
        ]
        return torch.stack(found)[:, : self.length]

    def plain_keys(self, firings: Firings) -> Float[Tensor, "firing plain token d_head"]:
        """Plain components' parts of every key that each firing's head sees, before norm scales, QK-norm and rotary
        positions; what rounding did while keys were read is left at zero (`reading_keys`)."""
        rec, weights, n = self.recording, self.recording.model.weights, self.length
        catalogue, group, everything = self.catalogue, weights.group, rec.plain_writes
        if 2 * n < everything.shape[2]:  # else a few more tokens cost less than a copy without them
            everything = everything[:, :, :n]
        out = everything.new_empty(len(firings), catalogue.n_plain, n, weights.W_K.shape[-1])
        first: dict[tuple[int, int, int], int] = {}
        for row, (prompt, site) in enumerate(firings.sites):
            layer, reader = site.layer or 0, (site.head or 0) // group
            same, W_K = first.setdefault((prompt, layer, reader), row), weights.W_K[layer, reader]
            if same != row:
                out[row] = out[same]
                continue
            _product(everything[prompt, : layer + 1], W_K, out[row, : layer + 1])
            if layer < self.layer:
                out[row, layer + 1 : self.layer + 1] = 0.0
            if weights.has_attention_bias:
                # A bias is one vector for all tokens: what a head reads of it differs by the frozen scales only.
                bias, into = (weights.attention_bias[:layer] @ W_K)[:, None], out[row, catalogue.biases]
                if rec.post_norm_scales is not None:
                    bias = bias / rec.post_norm_scales[:layer, prompt, :n, None]
                into[:layer], into[layer:] = bias, 0.0
            if rec.model.half:
                into = out[row, catalogue.roundings.start :]
                into[:layer], into[layer:] = rec.roundings[:layer, prompt, :n] @ W_K, 0.0
        # The offset comes behind the norm, whose scale will be taken away from all alike.
        scale = rec.norm_scales[firings.layer, firings.prompt, :n, None]
        out[:, catalogue.offset] = weights.b_K[firings.layer, firings.head // group][:, None] * scale
        return out


def _plain_at(
    recording: Recording, n: int, prompt: Int[Tensor, " firing"], token: Int[Tensor, " firing"]
) -> Float[Tensor, "firing n d_model"]:
    """The first plain writes at one token per firing."""
    writes = recording.plain_writes
    _, layers, tokens, _ = writes.shape
    row = (prompt[:, None] * layers + torch.arange(n, device=prompt.device)) * tokens + token[:, None]
    return writes.flatten(0, 2).index_select(0, row.flatten()).unflatten(0, row.shape)


def _product(
    writes: Float[Tensor, "n any d_model"],
    W: Float[Tensor, "d_model d_head"],
    out: Float[Tensor, "n token d_head"],
) -> None:
    """``writes @ W`` of the first tokens; without a copy where those are all."""
    if writes.shape[1] == out.shape[1]:
        torch.mm(writes.flatten(0, 1), W, out=out.view(-1, out.shape[2]))
    else:
        out.copy_((writes @ W)[:, : out.shape[1]])


def in_chunks(
    recording: Recording,
    firings: Firings,
    composer: Composer,
    trace_chunk: Callable[[Firings, Upstream], Iterable[Causes]],
) -> list[Causes]:
    """Trace firings in groups whose candidates fit into memory together."""
    found: list[Causes] = []
    for chunk, upstream in firing_chunks(recording, firings, composer):
        found.extend(trace_chunk(chunk, upstream))
        count(len(chunk))
    return found


def firing_chunks(
    recording: Recording, firings: Firings, composer: Composer
) -> Iterator[tuple[Firings, Upstream]]:
    """Firings in groups whose candidates fit into memory together.

    In short prompts, what costs most is a head's reading of upstream values: firings of one head go together. In long
    ones it is their attention patterns: firings of one prompt go together, by destination.
    """
    short = recording.token_ids.shape[1] <= SHORT

    def place(item: tuple[int, Site]) -> tuple[int, ...]:
        prompt, site = item
        layer, head, dest = site.layer or 0, site.head or 0, site.dest or 0
        return (-layer, head, prompt, dest) if short else (prompt, -layer, head, dest)

    kinds: dict[object, list[tuple[int, Site]]] = {}
    for item in sorted(firings.sites, key=place):
        kinds.setdefault(_kind_of_layer(recording, item[1].layer or 0), []).append(item)
    for order in kinds.values():
        start = 0
        while start < len(order):
            end, top, length = start, 0, 0
            while end < len(order):
                site = order[end][1]
                higher, longer = max(top, site.layer or 0), max(length, (site.dest or 0) + 1)
                if end > start and end - start >= _at_once(recording, higher, longer):
                    break
                end, top, length = end + 1, higher, longer
            chunk = order[start:end]
            yield Firings.of(chunk, recording.model.device), Upstream(recording, composer, top, length)
            start = end


def _kind_of_layer(recording: Recording, layer: int) -> object:
    """Layers of one kind attend in one way: the same scale, softcap, rotary positions and window."""
    rotary = recording.rotary[layer]
    turned = None if rotary is None else rotary.cos.data_ptr()
    return recording.scales[layer], recording.softcaps[layer], turned, recording.visible[layer].data_ptr()


def _at_once(recording: Recording, layer: int, length: int) -> int:
    """How many firings that see ``length`` tokens are traced together."""
    size = Catalogue.of(recording.model, layer, length).n_components * recording.model.d_head
    return max(CANDIDATES_AT_ONCE // size, min(LONG_GROUP, LONG_CANDIDATES // size), 1)
