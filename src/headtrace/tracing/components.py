"""The components upstream of a layer, numbered, and what the layer's heads read of them.

A head component (u, h, j) writes ``A_h[t, j] v_h[j] W_O`` at token t. Apart from one number per token it is a single
vector, so everything that a downstream head reads of it is ``v_h[j] W_O W`` with W that head's folded W_Q or W_K
(`headtrace.tracing.readings`). All other components (embedding, position, MLPs, biases,
rounding) are read directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.tracing.causes import PromptSite
from headtrace.tracing.readings import Composer, Readings
from headtrace.vocabulary import AttentionSide, Component, Site

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class ComponentIndex:
    """Numbers for the components upstream of a layer.

    First the non-head components: embedding, position (where that is apart from it), mlp 0.., attention_bias 0.. (if
    the model has such biases), offset (the bias of the reading head), in half precision rounding 0.. and what rounding
    did in the layer itself while it read. Then head components, by layer, head and source.

    >>> index = ComponentIndex(layer=3, n_heads=4, length=5, rounded=True)
    >>> all(index.number(index.component(n)) == n for n in range(index.n_components))
    True
    >>> [index.is_below(number, 1) for number in range(13)]  # embedding, MLPs, biases, offset, roundings
    [True, True, False, False, True, False, False, True, True, False, False, True, True]
    >>> unbiased = ComponentIndex(layer=3, n_heads=4, length=5, biased=False)
    >>> all(unbiased.number(unbiased.component(n)) == n for n in range(unbiased.n_components))
    True
    >>> placed = ComponentIndex(layer=3, n_heads=4, length=5, positions=True)
    >>> all(placed.number(placed.component(n)) == n for n in range(placed.n_components))
    True
    >>> [placed.is_below(number, 1) for number in range(9)]  # embedding, position, MLPs, biases, offset
    [True, True, True, False, False, True, False, False, True]
    """

    layer: int
    n_heads: int
    length: int
    """Source positions of each head."""
    rounded: bool = False
    """Whether the model runs in half precision, where rounding counts as a component."""
    biased: bool = True
    """Whether attention writes biases."""
    positions: bool = False
    """Whether what positions add to the token embeddings is a component of its own."""

    @classmethod
    def of(cls, recording: Recording, layer: int, length: int) -> ComponentIndex:
        model = recording.model
        biased = model.weights.has_attention_bias
        return cls(layer, model.n_heads, length, model.half, biased, recording.positions_apart)

    @cached_property
    def offset(self) -> int:
        """The number of the reader's own bias."""
        return self.mlps.stop + (self.layer if self.biased else 0)

    @cached_property
    def mlps(self) -> slice:
        """The numbers of MLPs, layer by layer; those before them are there before layer 0."""
        first = 2 if self.positions else 1
        return slice(first, first + self.layer)

    @property
    def biases(self) -> slice:
        """The numbers of attention biases, layer by layer."""
        return slice(self.mlps.stop, self.offset)

    @property
    def roundings(self) -> slice:
        """The numbers of what rounding added to the residual, layer by layer (the layer's own comes after them)."""
        return slice(self.offset + 1, self.offset + 1 + self.layer)

    @cached_property
    def n_non_head(self) -> int:
        return self.offset + 1 + (self.layer + 1 if self.rounded else 0)

    @cached_property
    def n_components(self) -> int:
        return self.n_non_head + self.layer * self.n_heads * self.length

    def is_below(self, number: int, layer: int) -> bool:
        """Whether a layer reads a component: one written below the layer, or the reader's own bias or rounding."""
        first = self.mlps.start
        if number < first or number == self.offset or (self.rounded and number == self.n_non_head - 1):
            return True
        if number >= self.n_non_head:
            return (number - self.n_non_head) // (self.length * self.n_heads) < layer
        return (
            (number - first) % self.layer if number < self.offset else number - self.roundings.start
        ) < layer

    def component(self, number: int, reader: Site | None = None) -> Component:
        """The component with a number; ``reader`` is the firing that reads it, whose own bias an offset is."""
        if number == 0:
            return Component("embedding")
        if number < self.mlps.start:
            return Component("position")
        if number < self.mlps.stop:
            return Component("mlp", number - self.mlps.start)
        if number < self.offset:
            return Component("attention_bias", number - self.biases.start)
        if number == self.offset:
            return Component("offset") if reader is None else Component("offset", reader.layer, reader.head)
        if number < self.n_non_head:
            if number == self.n_non_head - 1 and reader is not None:
                return Component("rounding", reader.layer)
            return Component("rounding", number - self.roundings.start)
        rest, src = divmod(number - self.n_non_head, self.length)
        layer, head = divmod(rest, self.n_heads)
        return Component("head", layer, head, src)

    def number(self, component: Component) -> int | None:
        """The number of a component; None for one that is not upstream of the layer."""
        kind, layer, head, src = component.kind, component.layer, component.head, component.src
        if kind == "embedding":
            return 0
        if kind == "position":
            return 1 if self.positions else None
        if kind == "offset":
            return self.offset
        if kind == "rounding":
            known = self.rounded and layer is not None and 0 <= layer <= self.layer
            return self.roundings.start + layer if known else None
        if layer is None or not 0 <= layer < self.layer:
            return None
        if kind == "mlp":
            return self.mlps.start + layer
        if kind == "attention_bias":
            return self.biases.start + layer if self.biased else None
        if head is None or src is None or head >= self.n_heads or src >= self.length:
            return None
        return self.n_non_head + (layer * self.n_heads + head) * self.length + src


@dataclass(frozen=True)
class Firings:
    """Firings of one or many prompts and layers: as sites, and as index tensors."""

    sites: Sequence[PromptSite]
    """Prompt and site of each row."""
    layer: Int[Tensor, " firing"]
    prompt: Int[Tensor, " firing"]
    head: Int[Tensor, " firing"]
    dest: Int[Tensor, " firing"]
    src: Int[Tensor, " firing"]
    groups: Mapping[PromptSite, tuple[int, ...]] = field(default_factory=dict[PromptSite, tuple[int, ...]])
    """Where attention is spread: all sources of a firing, which are explained together."""

    @classmethod
    def of(
        cls,
        sites: Sequence[PromptSite],
        device: torch.device,
        groups: Mapping[PromptSite, tuple[int, ...]] | None = None,
    ) -> Firings:
        """Firings from sites of heads, each with the number of its prompt."""
        rows = torch.tensor([(s.layer, p, s.head, s.dest, s.src) for p, s in sites], device=device)
        return cls(sites, *rows.unbind(dim=1), groups=groups or {})

    def sources(self, length: int) -> Int[Tensor, " firing"] | Bool[Tensor, "firing token"]:
        """The sources whose attention is explained: one for each firing, or a mask where some have several."""
        if not any(site in self.groups for site in self.sites):
            return self.src
        mask = torch.zeros(len(self.sites), length, dtype=torch.bool, device=self.src.device)
        mask[torch.arange(len(self.sites), device=mask.device), self.src] = True
        for row, site in enumerate(self.sites):
            mask[row, list(self.groups.get(site, ()))] = True
        return mask

    def __len__(self) -> int:
        return len(self.sites)


@dataclass(frozen=True)
class Upstream:
    """The components upstream of some firings in a recording, read by their heads with all scales frozen.

    Firings of several layers are traced together: a component that is not below a firing's own layer is zero for it.
    """

    recording: Recording
    composer: Composer
    layer: int
    """The highest layer that is read at: components below it have a number."""
    length: int
    """Tokens that matter: nothing after the last destination is visible to any firing."""

    @cached_property
    def index(self) -> ComponentIndex:
        return ComponentIndex.of(self.recording, self.layer, self.length)

    # -- head components -------------------------------------------------------------------------------------

    def readings(
        self, side: AttentionSide, firings: Firings, strength: Float[Tensor, "firing head_up src"]
    ) -> Readings:
        """Every upstream head's value vectors as read by each firing's head; ``strength`` is how strongly each is
        written where the firing reads."""
        group = 1 if side == "query" else self.recording.model.weights.group
        readers = [((site.layer or 0, (site.head or 0) // group), prompt) for prompt, site in firings.sites]
        values = self.recording.shared_values[: self.layer, ..., : self.length, :].flatten(0, 1)
        return Readings.of(self.composer, side, values, readers, strength)

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
        """At least ``sum over t of weight[t] A_h[t, j]`` for every upstream head h and source j: exactly that sum if
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

    # -- non-head components ---------------------------------------------------------------------------------

    def non_head_queries(self, firings: Firings) -> Float[Tensor, "firing non_head d_head"]:
        """Non-head components' parts of each firing's query, before QK-norm and rotary positions; without the rounding
        of the query itself."""
        rec, weights, l = self.recording, self.recording.model.weights, self.layer
        b, d = firings.prompt, firings.dest
        numbers = torch.arange(self.index.mlps.stop, device=d.device)
        below = (numbers[:l] < firings.layer[:, None]).to(rec.model.dtype)
        _, n_writes, tokens, _ = rec.plain_writes.shape
        row = (b[:, None] * n_writes + numbers) * tokens + d[:, None]
        embeddings_and_mlps = rec.plain_writes.flatten(0, 2).index_select(0, row.flatten())
        writes = [embeddings_and_mlps.unflatten(0, row.shape)]
        scale = [below.new_ones(len(firings), self.index.mlps.start), below]
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
        return torch.cat((queries[:, : self.index.offset], offset, queries[:, self.index.offset :]), dim=1)

    def non_head_keys(self, firings: Firings) -> Float[Tensor, "firing non_head token d_head"]:
        """Non-head components' parts of every key that each firing's head sees, before norm scales, QK-norm and rotary
        positions; the rounding of the keys themselves is left at zero."""
        rec, weights, n = self.recording, self.recording.model.weights, self.length
        index, group, writes = self.index, weights.group, rec.plain_writes
        if 2 * n < writes.shape[2]:  # else a few more tokens cost less than a copy without them
            writes = writes[:, :, :n]
        out = writes.new_empty(len(firings), index.n_non_head, n, weights.W_K.shape[-1])
        first: dict[tuple[int, int, int], int] = {}
        for row, (prompt, site) in enumerate(firings.sites):
            layer, reader = site.layer or 0, (site.head or 0) // group
            same, W_K = first.setdefault((prompt, layer, reader), row), weights.W_K[layer, reader]
            if same != row:
                out[row] = out[same]
                continue
            end = index.mlps.start + layer
            below, into = writes[prompt, :end], out[row, :end]
            if below.shape[1] == n:  # without a copy
                torch.mm(below.flatten(0, 1), W_K, out=into.view(-1, into.shape[2]))
            else:
                into.copy_((below @ W_K)[:, :n])
            if layer < self.layer:
                out[row, end : index.mlps.stop] = 0.0
            if weights.has_attention_bias:
                # A bias is one vector for all tokens: what a head reads of it differs by the frozen scales only.
                bias, into = (weights.attention_bias[:layer] @ W_K)[:, None], out[row, index.biases]
                if rec.post_norm_scales is not None:
                    bias = bias / rec.post_norm_scales[:layer, prompt, :n, None]
                into[:layer], into[layer:] = bias, 0.0
            if rec.model.half:
                into = out[row, index.roundings.start :]
                into[:layer], into[layer:] = rec.roundings[:layer, prompt, :n] @ W_K, 0.0
        # The offset is added after the norm, whose scale the caller divides all components by.
        scale = rec.norm_scales[firings.layer, firings.prompt, :n, None]
        out[:, index.offset] = weights.b_K[firings.layer, firings.head // group][:, None] * scale
        return out


@dataclass(frozen=True)
class ChannelRotary:
    """Rotary positions of a layer as algebra on channel bases: exact for full, partial and scaled rotary.

    Holds cosines and sines for the prompts of some firings. A row vector m is rotated at token t to
    ``(m1 cos - m2 sin, m2 cos + m1 sin, rest)``, where m1 and m2 are as wide as the tables.
    """

    cos: Float[Tensor, "firing token half"]
    sin: Float[Tensor, "firing token half"]

    @classmethod
    def of(
        cls, recording: Recording, layer: int, prompt: Int[Tensor, " firing"], length: int
    ) -> ChannelRotary:
        """The tables of the first ``length`` tokens; zero wide for models without rotary positions."""
        rotary = recording.rotary[layer]
        if rotary is None:
            empty = recording.norm_scales.new_empty(prompt.shape[0], length, 0)
            return cls(empty, empty)
        half = rotary.cos.shape[-1] // 2
        rows = prompt if rotary.cos.shape[0] > 1 else torch.zeros_like(prompt)
        # Some models keep these tables in float32 whatever their dtype.
        dtype = recording.norm_scales.dtype
        return cls(rotary.cos[rows, :length, :half].to(dtype), rotary.sin[rows, :length, :half].to(dtype))

    def __getitem__(self, which: Int[Tensor, " active"]) -> ChannelRotary:
        return ChannelRotary(self.cos[which], self.sin[which])

    @property
    def stretch(self) -> Float[Tensor, "firing token"]:
        """By how much a rotation can lengthen a vector (scaled rotary does)."""
        if self.cos.shape[-1] == 0:
            return self.cos.new_ones(self.cos.shape[:-1])
        return (self.cos.square() + self.sin.square()).amax(-1).sqrt().clamp_min(1.0)

    def basis_at(
        self, basis: Float[Tensor, "firing d_head channel"], token: Int[Tensor, " firing"]
    ) -> Float[Tensor, "firing d_head channel"]:
        """``R_t^T basis``: what the basis reads from a vector before its rotation, at one token per firing."""
        rows = torch.arange(token.shape[0], device=token.device)
        cos, sin = self.cos[rows, token][..., None], self.sin[rows, token][..., None]
        first, second, rest = self._split(basis, dim=1)
        return torch.cat((cos * first + sin * second, cos * second - sin * first, rest), dim=1)

    def rotate(
        self, x: Float[Tensor, "firing n token d_head"], times: Float[Tensor, "firing token"]
    ) -> Float[Tensor, "firing n token d_head"]:
        """Rotate the vectors of every token, times a number for each token."""
        one = times[:, None, :, None]
        return self._rotated(x, self.cos[:, None] * one, self.sin[:, None] * one, one)

    def weighted_table(self, weight: Float[Tensor, "firing token"]) -> Float[Tensor, "firing token table"]:
        """Columns ``weight cos``, ``weight sin`` and ``weight``: all that a weighted sum over tokens needs."""
        w = weight[..., None]
        return torch.cat((w * self.cos, w * self.sin, w), dim=-1)

    def rotate_summed(
        self, m: Float[Tensor, "firing n d_head"], sums: Float[Tensor, "firing n table"]
    ) -> Float[Tensor, "firing n d_head"]:
        """``sum over t of weight_t (m rotated at t)``, from the sums of the weighted table over tokens."""
        half = self.cos.shape[-1]
        return self._rotated(m, *sums.split([half, half, 1], dim=-1))

    def rotated_dot(
        self, m: Float[Tensor, "firing n d_head"], g: Float[Tensor, "firing n d_head"]
    ) -> Float[Tensor, "firing n token"]:
        """``(m rotated at t) . g`` for every token t."""
        m1, m2, m3 = self._split(m, dim=-1)
        g1, g2, g3 = self._split(g, dim=-1)
        even, odd = m1 * g1 + m2 * g2, m1 * g2 - m2 * g1
        return even @ self.cos.mT + odd @ self.sin.mT + (m3 * g3).sum(-1, keepdim=True)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor, one: Tensor) -> Tensor:
        first, second, rest = self._split(x, dim=-1)
        out = torch.empty_like(x)
        out_first, out_second, out_rest = self._split(out, dim=-1)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        torch.mul(rest, one, out=out_rest)
        return out

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """First half, second half and rest of the head dimension."""
        half = self.cos.shape[-1]
        return x.split([half, half, x.shape[dim] - 2 * half], dim=dim)  # type: ignore[return-value]
