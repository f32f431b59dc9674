"""What upstream components contribute to the queries and keys of one layer's heads.

A head component (u, h, j) writes ``A_h[t, j] v_h[j] W_O`` at token t: apart from one number per token it is a
single vector, so all its readings by a downstream head are ``v_h[j] (W_O W)`` with W the head's folded W_Q or
W_K. That product of weights is composed once per model where it fits into memory.

Components of a layer are numbered: embedding, mlp 0.., attention_bias 0.., offset (the *plain* ones), then heads by
layer, head and source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.tracing.causes import Causes
from headtrace.vocabulary import AttentionSide, Component, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

COMPOSED_BYTES = 1_000_000_000
"""Composed weights are kept for models whose full set takes at most this much.

SmolLM2-135M takes 0.77 GB, GPT-2 small 0.31 GB.
"""

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

    @property
    def n_plain(self) -> int:
        return 2 + 2 * self.layer

    @property
    def n_components(self) -> int:
        return self.n_plain + self.layer * self.n_heads * self.length

    def component(self, number: int, head: int | None = None) -> Component:
        """The component behind a number; ``head`` is the reading head, whose own bias an offset is."""
        l = self.layer
        if number == 0:
            return Component("embedding")
        if number <= l:
            return Component("mlp", number - 1)
        if number <= 2 * l:
            return Component("attention_bias", number - 1 - l)
        if number == 2 * l + 1:
            return Component("offset", self.layer, head)
        rest, src = divmod(number - self.n_plain, self.length)
        upstream, which = divmod(rest, self.n_heads)
        return Component("head", upstream, which, src)


@dataclass
class Composer:
    """Readings of head writes, through composed weights (``W_O W``) where those are kept or cheaper."""

    model: Model
    kept: dict[tuple[str, int, int], Tensor] = field(default_factory=dict[tuple[str, int, int], Tensor])

    def __post_init__(self) -> None:
        m = self.model
        pairs = m.n_heads * m.n_layers * (m.n_layers - 1) // 2 * (m.n_heads + m.n_kv_heads)
        width = torch.finfo(m.dtype).bits // 8
        self.keep = pairs * m.d_head**2 * width <= COMPOSED_BYTES

    def read(
        self, side: AttentionSide, layer: int, head: int, values: Float[Tensor, "head_up row d_head"]
    ) -> Float[Tensor, "head_up row d_head"]:
        """``v W_O W`` for all heads upstream of ``layer``, read by one head (query head, or key-value head)."""
        weights = self.model.weights
        W = weights.W_Q[layer, head] if side == "query" else weights.W_K[layer, head]
        W_O = weights.W_O[:layer].flatten(0, 1)
        d_model, d_head = W.shape
        # Which order of the three factors costs less depends on the number of rows.
        if not self.keep and values.shape[1] * (d_model - d_head) < d_head * d_model:
            return (values @ W_O) @ W
        return torch.bmm(values, self._composed(side, layer, head, W_O, W))

    def _composed(self, side: str, layer: int, head: int, W_O: Tensor, W: Tensor) -> Tensor:
        key = (side, layer, head)
        if key in self.kept:
            return self.kept[key]
        composed = W_O @ W
        if self.keep:
            self.kept[key] = composed
        return composed


@dataclass(frozen=True)
class Readings:
    """Upstream heads' value vectors as read by some firings' heads; equal prompts and readers are computed once."""

    values: Float[Tensor, "head_up pair src d_head"]
    of: Int[Tensor, " firing"]
    """The pair of prompt and reader that a firing looks at."""

    @cached_property
    def norms(self) -> Float[Tensor, "firing head_up src"]:
        """The length of each vector."""
        return self.values.norm(dim=-1)[:, self.of].transpose(0, 1)

    def at(
        self, which: Int[Tensor, " active"], head_up: Int[Tensor, "active n"], src: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n d_head"]:
        """The vectors of some head components of some firings."""
        return self.values[head_up, self.of[which][:, None], src]

    def mixed(self, strength: Float[Tensor, "firing head_up src"]) -> Float[Tensor, "firing head_up d_head"]:
        """Each upstream head's vectors, added up over sources with a strength."""
        out = strength.new_empty(*strength.shape[:2], self.values.shape[-1])
        for pair in range(self.values.shape[1]):
            mine = (self.of == pair).nonzero()[:, 0]
            out[mine] = torch.bmm(strength[mine].transpose(0, 1), self.values[:, pair]).transpose(0, 1)
        return out


@dataclass(frozen=True)
class LayerFirings:
    """Firings of one layer, of one or many prompts, as index tensors."""

    layer: int
    prompt: Int[Tensor, " firing"]
    head: Int[Tensor, " firing"]
    dest: Int[Tensor, " firing"]
    src: Int[Tensor, " firing"]

    def __len__(self) -> int:
        return self.prompt.shape[0]

    @classmethod
    def of(cls, layer: int, sites: Sequence[tuple[int, Site]], device: torch.device) -> LayerFirings:
        """Prompt and head site of each row."""
        rows = torch.tensor([(p, s.head, s.dest, s.src) for p, s in sites], device=device)
        return cls(layer, *rows.unbind(dim=1))

    def sites(self) -> list[tuple[int, Site]]:
        """Prompt and site of each row."""
        rows = torch.stack((self.prompt, self.head, self.dest, self.src), dim=1).tolist()
        return [(prompt, Site("head", self.layer, head, dest, src)) for prompt, head, dest, src in rows]

    def __getitem__(self, rows: slice | Tensor) -> LayerFirings:
        return LayerFirings(self.layer, self.prompt[rows], self.head[rows], self.dest[rows], self.src[rows])


@dataclass(frozen=True)
class Upstream:
    """The components upstream of one layer in a recording, read by that layer's heads with all scales frozen."""

    recording: Recording
    composer: Composer
    layer: int
    length: int
    """Tokens that matter: nothing after the last destination is visible to any firing."""

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.layer, self.recording.model.n_heads, self.length)

    def readings(self, side: AttentionSide, firings: LayerFirings) -> Readings:
        """Every upstream head's value vectors as read by each firing's head, reader by reader for all its prompts."""
        readers = firings.head if side == "query" else firings.head // self.recording.model.weights.group
        n_prompts = len(self.recording)
        pairs, of = torch.unique(readers * n_prompts + firings.prompt, return_inverse=True)
        values = self.recording.bare_values.transpose(0, 1)[:, : self.layer, :, : self.length]
        d_head, heads_up = values.shape[-1], self.layer * values.shape[2]
        parts: list[Tensor] = []
        for reader in (pairs // n_prompts).unique().tolist():
            mine = values[pairs[pairs // n_prompts == reader] % n_prompts]
            rows = mine.permute(1, 2, 0, 3, 4).reshape(heads_up, -1, d_head)
            parts.append(self.composer.read(side, self.layer, reader, rows))
        read = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return Readings(read.reshape(heads_up, len(pairs), self.length, d_head), of)

    def pattern_rows(
        self, firings: LayerFirings, token: Int[Tensor, " firing"]
    ) -> Float[Tensor, "firing head_up src"]:
        """How strongly every upstream head component writes at one token per firing (over post-norm scales)."""
        rec, b = self.recording, firings.prompt
        rows = rec.patterns[: self.layer, :, :, :, : self.length][:, b, :, token]
        if rec.post_norm_scales is not None:
            rows = rows / rec.post_norm_scales[: self.layer, b, token].T[:, :, None, None]
        return rows.flatten(1, 2)

    def pattern_columns(
        self, prompt: Int[Tensor, " active"], head_up: Int[Tensor, "active n"], src: Int[Tensor, "active n"]
    ) -> Float[Tensor, "active n token"]:
        """How strongly some head components write at every token."""
        rec, n_heads = self.recording, self.recording.model.n_heads
        layer, head, p = head_up // n_heads, head_up % n_heads, prompt[:, None]
        columns = rec.patterns[:, :, :, : self.length][layer, p, head, :, src]
        if rec.post_norm_scales is not None:
            columns = columns / rec.post_norm_scales[layer, p, : self.length]
        return columns

    def attended(self, firings: LayerFirings, weight: Float[Tensor, "firing token"]) -> Float[Tensor, "firing head_up src"]:
        """``sum over t of weight[t] A_h[t, j]`` for every upstream head h and source j; one product per prompt."""
        rec, l, n = self.recording, self.layer, self.length
        out = weight.new_empty(len(firings), l * rec.model.n_heads, n)
        for prompt in firings.prompt.unique().tolist():
            mine = (firings.prompt == prompt).nonzero()[:, 0]
            rows = weight[mine]
            if rec.post_norm_scales is not None:
                rows = (rows / rec.post_norm_scales[:l, prompt, None, :n])[:, None]
            product = rows @ rec.patterns[:l, prompt, :, :n, :n]
            out[mine] = product.flatten(0, 1).transpose(0, 1)
        return out

    def plain_queries(self, firings: LayerFirings) -> Float[Tensor, "firing plain d_head"]:
        """Plain components' parts of each firing's query, before QK-norm and rotary positions, offset last."""
        rec, weights, l = self.recording, self.recording.model.weights, self.layer
        b, d = firings.prompt, firings.dest
        written = rec.plain_writes[:, : l + 1][b, :, d]
        bias = weights.attention_bias[:l].expand(len(firings), -1, -1)
        if rec.post_norm_scales is not None:
            bias = bias / rec.post_norm_scales[:l, b, d].T[..., None]
        writes = torch.cat((written, bias), dim=1) / rec.norm_scales[l, b, d][:, None, None]
        parts = writes @ weights.W_Q[l, firings.head]
        return torch.cat((parts, weights.b_Q[l, firings.head][:, None]), dim=1)

    def plain_keys(self, firings: LayerFirings) -> Float[Tensor, "firing plain token d_head"]:
        """Plain components' parts of every key that each firing's head sees, before QK-norm and rotary positions."""
        rec, weights, l, n = self.recording, self.recording.model.weights, self.layer, self.length
        readers = firings.head // weights.group
        # A bias is one vector for all tokens: what a head reads of it differs by the frozen scales only.
        bias = torch.bmm(weights.attention_bias[:l].expand(len(weights.W_K[l]), -1, -1), weights.W_K[l])
        out = bias.new_empty(len(firings), self.catalogue.n_plain, n, bias.shape[-1])
        out[:, l + 1 : 2 * l + 1] = bias[readers][:, :, None]
        if rec.post_norm_scales is not None:
            out[:, l + 1 : 2 * l + 1] /= rec.post_norm_scales[:l, firings.prompt, :n].transpose(0, 1)[..., None]
        first: dict[tuple[int, int], int] = {}
        for row, pair in enumerate(zip(firings.prompt.tolist(), readers.tolist(), strict=True)):
            if pair in first:
                out[row, : l + 1] = out[first[pair], : l + 1]
                continue
            first[pair] = row
            prompt, reader = pair
            torch.matmul(rec.plain_writes[prompt, : l + 1, :n], weights.W_K[l, reader], out=out[row, : l + 1])
        out[:, :-1] /= rec.norm_scales[l, firings.prompt, None, :n, None]
        out[:, -1] = weights.b_K[l, readers][:, None]
        return out


def in_chunks(
    recording: Recording,
    firings: LayerFirings,
    composer: Composer,
    trace_chunk: Callable[[LayerFirings, Upstream], Iterable[Causes]],
) -> list[Causes]:
    """Trace firings in groups whose candidates fit into memory together."""
    chunks = firing_chunks(recording, firings, composer)
    return [found for chunk, upstream in chunks for found in trace_chunk(chunk, upstream)]


def firing_chunks(
    recording: Recording, firings: LayerFirings, composer: Composer
) -> Iterator[tuple[LayerFirings, Upstream]]:
    """Firings in groups whose candidates fit into memory together.

    In short prompts, what costs most is a head's reading of upstream values: firings of one head go together. In long
    ones it is their attention patterns: firings of one prompt go together, by destination.
    """
    width = recording.token_ids.shape[1]
    first, second = (firings.head, firings.prompt) if width <= SHORT else (firings.prompt, firings.head)
    key = (first * max(len(recording), recording.model.n_heads) + second) * width + firings.dest
    order = torch.argsort(key, stable=True)
    dests = firings.dest[order].tolist()
    start = 0
    while start < len(dests):
        end, length = start + 1, dests[start] + 1
        while end < len(dests) and end - start < _at_once(
            recording, firings.layer, max(length, dests[end] + 1)
        ):
            length = max(length, dests[end] + 1)
            end += 1
        yield firings[order[start:end]], Upstream(recording, composer, firings.layer, length)
        start = end


def _at_once(recording: Recording, layer: int, length: int) -> int:
    """How many firings that see ``length`` tokens are traced together."""
    size = Catalogue(layer, recording.model.n_heads, length).n_components * recording.model.d_head
    return max(CANDIDATES_AT_ONCE // size, min(LONG_GROUP, LONG_CANDIDATES // size), 1)
