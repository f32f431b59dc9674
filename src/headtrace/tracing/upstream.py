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
        self,
        side: AttentionSide,
        layer: int,
        head: int,
        values: Float[Tensor, "upstream head token d_head"],
        out: Float[Tensor, "upstream_head token d_head"],
    ) -> None:
        """``v W_O W`` for all heads upstream of ``layer``, read by one head (query head, or key-value head)."""
        weights = self.model.weights
        W = weights.W_Q[layer, head] if side == "query" else weights.W_K[layer, head]
        W_O = weights.W_O[:layer].flatten(0, 1)
        flat = values.flatten(0, 1)
        d_model, d_head = W.shape
        if self.keep:
            torch.bmm(flat, self._composed(side, layer, head, W_O, W), out=out)
            return
        # Which order of the three factors costs less depends on the number of tokens.
        if flat.shape[1] * (d_model - d_head) < d_head * d_model:
            torch.matmul(flat @ W_O, W, out=out)
        else:
            torch.bmm(flat, W_O @ W, out=out)

    def _composed(self, side: str, layer: int, head: int, W_O: Tensor, W: Tensor) -> Tensor:
        key = (side, layer, head)
        if key not in self.kept:
            self.kept[key] = W_O @ W
        return self.kept[key]


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

    def head_readings(
        self, side: AttentionSide, firings: LayerFirings
    ) -> Float[Tensor, "firing head_up src d_head"]:
        """Every upstream head's value vectors as read by each firing's head; equal readers are computed once."""
        readers = firings.head
        if side == "key":
            readers = readers // self.recording.model.weights.group
        values = self.recording.bare_values[: self.layer, :, :, : self.length]

        def read(prompt: int, reader: int, out: Tensor) -> None:
            self.composer.read(side, self.layer, reader, values[:, prompt], out)

        shape = (len(firings), self.layer * values.shape[2], self.length, values.shape[-1])
        return _once_per_pair(firings.prompt, readers, values.new_empty(shape), read)

    def plain_writes(self, prompt: int, token: Tensor | slice) -> Float[Tensor, "plain *token d_model"]:
        """Writes of embedding, MLPs and attention biases (the offset has no write) at some tokens of one prompt."""
        rec, l = self.recording, self.layer
        embedding, mlps = rec.embedding[None, prompt, token], rec.mlp_writes[:l, prompt, token]
        bias = rec.model.weights.attention_bias[:l]
        bias = bias.reshape(l, *[1] * (mlps.ndim - 2), -1).expand_as(mlps)
        if rec.post_norm_scales is not None:
            bias = bias / rec.post_norm_scales[:l, prompt, token, None]
        return torch.cat((embedding, mlps, bias))

    def plain_queries(self, firings: LayerFirings) -> Float[Tensor, "firing plain d_head"]:
        """Plain components' parts of each firing's query, before QK-norm and rotary positions, offset last."""
        rec, weights, l = self.recording, self.recording.model.weights, self.layer
        b, d = firings.prompt, firings.dest
        writes = torch.cat((rec.embedding[None, b, d], rec.mlp_writes[:l, b, d]))
        bias = weights.attention_bias[:l, None].expand(-1, len(firings), -1)
        if rec.post_norm_scales is not None:
            bias = bias / rec.post_norm_scales[:l, b, d, None]
        writes = torch.cat((writes, bias)).transpose(0, 1) / rec.norm_scales[l, b, d][:, None, None]
        parts = writes @ weights.W_Q[l, firings.head]
        return torch.cat((parts, weights.b_Q[l, firings.head][:, None]), dim=1)

    def plain_keys(self, firings: LayerFirings) -> Float[Tensor, "firing plain token d_head"]:
        """Plain components' parts of every key that each firing's head sees, before QK-norm and rotary positions."""
        rec, weights, l = self.recording, self.recording.model.weights, self.layer
        readers = firings.head // weights.group
        known: dict[int, Tensor] = {}

        def read(prompt: int, reader: int, out: Tensor) -> None:
            if prompt not in known:  # firings come sorted by prompt
                known.clear()
                writes = self.plain_writes(prompt, slice(0, self.length))
                known[prompt] = writes / rec.norm_scales[l, prompt, : self.length, None]
            torch.matmul(known[prompt], weights.W_K[l, reader], out=out[:-1])
            out[-1] = weights.b_K[l, reader]

        shape = (len(firings), self.catalogue.n_plain, self.length, weights.W_K.shape[-1])
        return _once_per_pair(firings.prompt, readers, rec.norm_scales.new_empty(shape), read)


def _once_per_pair(
    prompt: Int[Tensor, " firing"],
    reader: Int[Tensor, " firing"],
    out: Float[Tensor, "firing *rest"],
    read: Callable[[int, int, Tensor], None],
) -> Float[Tensor, "firing *rest"]:
    """Fill one row per firing; firings that share a prompt and a reading head are computed once and copied."""
    first: dict[tuple[int, int], int] = {}
    for row, pair in enumerate(zip(prompt.tolist(), reader.tolist(), strict=True)):
        if pair in first:
            out[row] = out[first[pair]]
        else:
            first[pair] = row
            read(*pair, out[row])
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
    """Firings in groups, prompt by prompt and by destination, whose candidates fit into memory together."""
    order = torch.argsort(firings.prompt * recording.token_ids.shape[1] + firings.dest, stable=True)
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
