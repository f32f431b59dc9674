"""One forward pass -> Recording: every residual as the exact sum of what was written into it.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> recording.check().worst < 1e-4                             # the identities, verified
True
>>> recording.patterns[2, 0, 1].shape                          # attention of L2H1: (dest, src)
torch.Size([15, 15])
>>> recording.write(headtrace.Component("head", 1, 3, src=2)).shape   # what L1H3 wrote from position 2
torch.Size([15, 128])

Tensors have the axes (layer, batch, ...). Prompts of different lengths are padded on the right, where no real token
can see; ``recording[i]`` is the recording of one prompt without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.attention import softcap
from headtrace.models.identities import (
    IdentityReport,
    check_identities,
    folded_queries_keys,
    require_rounding,
)
from headtrace.models.observer import Rotary
from headtrace.models.patterns import (
    KeptPatterns,
    Patterns,
    RecomputedPatterns,
    attended_pairs,
    check_firing,
    find_firing,
)
from headtrace.models.recorded_fields import Recorded, RecordedIf, axis_sizes
from headtrace.tables import html_table, human
from headtrace.vocabulary import Component, Firing, Site

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from headtrace.models.integrity import WeightsVersion
    from headtrace.models.model import Model

WRITES_AT_ONCE = 64
"""Head components whose writes are computed together, each with its own rows of ``W_O``."""


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """What one forward pass wrote, read and attended to. Made by ``Model.record``."""

    model: Model
    lengths: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    """The recorded tensors by name. They are attributes, too."""
    rotary: tuple[Rotary | None, ...]
    visible: tuple[Bool[Tensor, "batch dest src"], ...]
    """Per layer, which keys each destination sees (causal, sliding window)."""
    scales: tuple[float, ...]
    softcaps: tuple[float | None, ...]
    weights_version: WeightsVersion | None = field(default=None, repr=False)
    """The model's weights when this was recorded."""
    head_writes: Float[Tensor, "batch layer head token d_model"] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """What each head would write for each source if it attended to nothing else, ``v[j] W_O``, before any norm of what
    attention writes. Only where it was kept (`keep_head_writes`)."""

    token_ids = Recorded("batch token", dtype=torch.int64)
    logits = Recorded("batch kept vocab")
    """Output logits at ``logit_positions``: every position, or each prompt's last ones."""
    logit_positions = Recorded("batch kept", dtype=torch.int64)
    residuals = Recorded("layer_and_final batch token d_model")
    """The residual at the input of every layer; the last row is the input of the final norm."""
    position_embedding = RecordedIf(
        "batch token d_model", when=lambda facts: facts.position_embedding is not None
    )
    """What the first residual has because of positions, in models that add it to the token embeddings; kept with the
    residuals."""
    queries = Recorded("layer batch head token d_head")
    keys = Recorded("layer batch kv_head token d_head")
    values = Recorded("layer batch kv_head token d_head")
    """Queries, keys and values as attention uses them: after biases, QK-norm and rotary positions."""
    patterns = Recorded("layer batch head dest src")
    """Attention, unless it is computed again from queries and keys (``patterns="recompute"``); `attention` has both."""
    log_normalisers = Recorded("layer batch head token", by_default=False)
    """Instead of the patterns: the logarithm of the sum that each row of attention was divided by."""
    column_maxima = Recorded("layer batch head block token", by_default=False)
    """Instead of the patterns: the largest attention to every source, in each block of destinations."""
    mlp_writes = Recorded("layer batch token d_model")
    norm_scales = Recorded("layer_and_final batch token")
    """The frozen scale of the norm before each layer's attention (one where there is none), and of the final norm."""
    post_norm_scales = RecordedIf(
        "layer batch token", when=lambda facts: facts.attention_post_norm is not None
    )
    query_scales = RecordedIf("layer batch head token", when=lambda facts: facts.query_key_norm is not None)
    key_scales = RecordedIf("layer batch kv_head token", when=lambda facts: facts.query_key_norm is not None)
    mlp_inputs = Recorded("layer batch token d_model", by_default=False)
    """What every MLP reads, after its norm."""
    mlp_norm_scales = Recorded("layer batch token", by_default=False)
    """The frozen scale of the norm before each MLP (one where there is none)."""
    mlp_post_norm_scales = RecordedIf(
        "layer batch token", when=lambda facts: facts.mlp_post_norm is not None, by_default=False
    )

    FIELDS: ClassVar[Mapping[str, Recorded]]
    ALWAYS: ClassVar[tuple[str, ...]] = ("token_ids", "logits", "logit_positions")

    def __post_init__(self) -> None:
        """The axes of all tensors agree with each other and with the model, and there is one of a kind per layer."""
        if self.weights_version is None:
            object.__setattr__(self, "weights_version", self.model.refresh())
        token_ids, logits = self.tensors["token_ids"], self.tensors["logits"]
        if token_ids.ndim != 2 or logits.ndim != 3:
            raise InputError(
                "A recording's token ids have the axes (batch, token), its logits (batch, kept, vocab)."
            )
        batch, length = token_ids.shape
        sizes = axis_sizes(self.model, batch, length, logits.shape[1])
        for name, tensor in self.tensors.items():
            if name not in self.FIELDS:
                raise InputError(f"A recording has no tensor {name!r}: it may have {', '.join(self.FIELDS)}.")
            expected = self.FIELDS[name].shape(sizes)
            if tuple(tensor.shape) != expected:
                raise InputError(
                    f"A recording's {name!r} has the axes ({', '.join(self.FIELDS[name].axes)}): expected "
                    f"{expected}, got {tuple(tensor.shape)}."
                )
        if len(self.lengths) != batch or min(self.lengths) < 1 or max(self.lengths) != length:
            raise InputError(
                f"A recording of {batch} prompts, padded to {length} tokens, cannot have the lengths {self.lengths}."
            )
        self._check_layers(batch, length)

    def _check_layers(self, batch: int, length: int) -> None:
        for name in ("rotary", "visible", "scales", "softcaps"):
            if len(getattr(self, name)) != self.model.n_layers:
                raise InputError(
                    f"A recording has one of {name!r} for each of {self.model.n_layers} layers, not "
                    f"{len(getattr(self, name))}."
                )
        tables = [table for rotary in self.rotary if rotary is not None for table in (rotary.cos, rotary.sin)]
        for table in tables:
            good = table.ndim == 3 and table.shape[0] in (1, batch) and table.shape[1] == length
            if not good or table.shape[2] % 2 or table.shape[2] > self.model.d_head:
                raise InputError(
                    f"A rotary table of {length} tokens cannot have the shape {tuple(table.shape)}."
                )
        for mask in self.visible:
            if tuple(mask.shape) != (batch, length, length):
                raise InputError(
                    f"A recording's 'visible' has the axes (batch, dest, src): expected {(batch, length, length)}, got "
                    f"{tuple(mask.shape)}."
                )

    # -- showing ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        many = f"{len(self)} prompts of {min(self.lengths)} to " if len(self) > 1 else ""
        return (
            f"Recording({self.model.name!r}: {many}{max(self.lengths)} tokens, {self.model.n_layers} layers x "
            f"{self.model.n_heads} heads, {len(self.tensors)} tensors, {human(self.n_bytes)})"
        )

    def _repr_html_(self) -> str:
        """The prompts with their likeliest next tokens."""
        rows = [self._html_row(i) for i in range(min(len(self), 10))]
        return html_table(("prompt", "tokens", "text", "next"), rows, title=repr(self))

    def _html_row(self, prompt: int) -> tuple[str, ...]:
        likely = self.top_answers(min(3, self.model.d_output), prompt)
        text = "".join(self.tokens(prompt))
        answers = ", ".join(f"{token!r} {probability:.0%}" for token, _, probability in likely)
        return (
            str(prompt),
            str(self.lengths[prompt]),
            text if len(text) <= 200 else f"{text[:197]}...",
            answers,
        )

    @property
    def n_bytes(self) -> int:
        """What the tensors take in memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    # -- one prompt ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, prompt: int) -> Recording:
        """The recording of one prompt, without padding (a view: nothing is copied)."""
        b = self.prompt_index(prompt)
        n, one = self.lengths[b], slice(b, b + 1)
        tensors = {name: self.FIELDS[name].cut(t, b, n) for name, t in self.tensors.items()}
        inside = tensors["logit_positions"][0] < n
        if not bool(inside.all()):  # every position was kept: those of the padding go
            tensors |= {name: tensors[name][:, inside] for name in ("logits", "logit_positions")}
        return replace(
            self,
            lengths=(n,),
            tensors=tensors,
            rotary=tuple(
                None if r is None else Rotary(_rows(r.cos, one)[:, :n], _rows(r.sin, one)[:, :n])
                for r in self.rotary
            ),
            visible=tuple(v[one, :n, :n] for v in self.visible),
        )

    def repeated(self, n: int) -> Recording:
        """The recording of one prompt as a batch of ``n`` of it (views: nothing is copied)."""
        if len(self) != 1:
            raise InputError(f"The recording has {len(self)} prompts: choose one, like recording[0].")

        def widened(name: str, tensor: Tensor) -> Tensor:
            axes = self.FIELDS[name].axes
            return (
                tensor.expand([n if axis == "batch" else -1 for axis in axes]) if "batch" in axes else tensor
            )

        return replace(
            self,
            lengths=self.lengths * n,
            tensors={name: widened(name, tensor) for name, tensor in self.tensors.items()},
            visible=tuple(v.expand(n, -1, -1) for v in self.visible),
        )

    def split(self, n: int) -> tuple[Recording, Recording]:
        """The recordings of the first ``n`` prompts and of the others, padded as they are (views)."""

        def part(some: slice) -> Recording:
            masks = {id(mask): mask[some] for mask in self.visible}  # layers share them

            def narrow(name: str, tensor: Tensor) -> Tensor:
                axes = self.FIELDS[name].axes
                return tensor[tuple(some if axis == "batch" else slice(None) for axis in axes)]

            return replace(
                self,
                lengths=self.lengths[some],
                tensors={name: narrow(name, tensor) for name, tensor in self.tensors.items()},
                rotary=tuple(
                    None if r is None else Rotary(_rows(r.cos, some), _rows(r.sin, some)) for r in self.rotary
                ),
                visible=tuple(masks[id(mask)] for mask in self.visible),
            )

        return part(slice(n)), part(slice(n, None))

    def with_tensors(self, **changed: Tensor) -> Recording:
        """A copy with other tensors in the place of some."""
        return replace(self, tensors={**self.tensors, **changed})

    def prompt_index(self, prompt: int) -> int:
        """The place of a prompt in the batch, from 0; negative numbers count from the end."""
        if not -len(self) <= prompt < len(self):
            raise InputError(f"There is no prompt {prompt} in this recording of {len(self)}.")
        return prompt % len(self)

    def tokens(self, prompt: int = 0) -> tuple[str, ...]:
        """Readable text of one prompt's tokens."""
        return self.model.token_labels(self.token_ids[prompt, : self.lengths[prompt]].tolist())

    def logits_at(self, prompt: int, position: int) -> Float[Tensor, " vocab"]:
        """Output logits of one prompt at one position."""
        column = (self.logit_positions[prompt] == position).nonzero()
        if not len(column):
            raise InputError(
                f"The output logits at position {position} were not kept (last_logits={self.logits.shape[1]}). "
                "Record without last_logits, or with a larger number."
            )
        return self.logits[prompt, int(column[0])]

    def last_logits(self, prompt: int = 0) -> Float[Tensor, " vocab"]:
        """Output logits at the prompt's last position."""
        return self.logits_at(prompt, self.lengths[prompt] - 1)

    def top_answers(self, k: int = 5, prompt: int = 0) -> list[tuple[str, int, float]]:
        """The k likeliest next tokens: text, id and probability."""
        values, ids = self.last_logits(prompt).softmax(-1).topk(k)
        labels = self.model.output_labels(ids.tolist())
        return list(zip(labels, ids.tolist(), values.tolist(), strict=True))

    def strongest_firings(self, prompt: int = 0, *, skip_first: bool = True) -> list[tuple[Firing, float]]:
        """Every head's strongest firing: where it attends most, by default past the first token (the usual sink)."""
        n, first = self.lengths[prompt], 1 if skip_first and self.lengths[prompt] > 1 else 0
        width = n - first
        layers = range(self.model.n_layers)
        found = [self.pattern(l)[prompt, :, first:n, first:n].flatten(1).max(dim=-1) for l in layers]
        values, places = (torch.stack(each) for each in zip(*found, strict=True))
        return [
            (Firing(layer, head, place // width + first, place % width + first), value)
            for layer, row in enumerate(zip(values.tolist(), places.tolist(), strict=True))
            for head, (value, place) in enumerate(zip(*row, strict=True))
        ]

    def frame(self, min: float = 0.0, *, prompt: int = 0) -> pl.DataFrame:
        """The attention of one prompt: a row per head and pair of tokens that it sees, the strongest first."""
        return self.firings(min, prompt=prompt)

    def firings(
        self,
        min: float = 0.3,
        *,
        head: str | None = None,
        dest: int | str | None = None,
        src: int | str | None = None,
        prompt: int = 0,
    ) -> pl.DataFrame:
        """Every pair that a head attends to with at least ``min``, the strongest first: firing, layer, head, dest, src,
        from and to (the tokens), attention.

        ``head`` (``"L9H6"``), ``dest`` and ``src`` (a position, or a word: all its occurrences, ``John#2`` the second)
        choose among them. `strongest_firings` has one for every head instead.
        """
        return attended_pairs(self, min, head=head, dest=dest, src=src, prompt=prompt)

    def find_firing(self, given: Firing | str, prompt: int = 0) -> tuple[Firing, str | None]:
        """The firing that is meant by ``L9H6:14:3``, ``L9H6:to:John``, ``L9H6:to:John#2``, ``L9H6:to`` or ``L9H6``,
        and what was assumed in finding it.

        Words that could mean several pairs are refused with the choices. Without a source, the one that the destination
        attends to most; a head alone means its strongest pair past the first token (the usual sink).

        >>> import headtrace
        >>> recording = headtrace.load("builtin").record("When Mary and John went to the store, John gave a drink to")
        >>> recording.find_firing("L2H0:to#2:John#2")[0]
        Firing(layer=2, head=0, dest=14, src=10)
        >>> print(recording.find_firing("L2H0")[1])
        L2H0 was given alone: 14->10 is the strongest pair of the head past the first token.
        """
        return find_firing(self, given, prompt)

    def check_firing(self, firing: Firing, prompt: int = 0) -> None:
        """Is there such a head, are there such positions, and does the destination see the source?"""
        check_firing(self, firing, prompt)

    # -- attention -------------------------------------------------------------------------------------------

    @property
    def attention(self) -> Patterns:
        """Attention weights by parts, whether patterns were kept or are computed again (`models.patterns`)."""
        # Made anew: one that was kept here would hold the recording that holds it, and neither would be freed before
        # the garbage collector comes by, which knows nothing of the size of tensors.
        if "patterns" in self.tensors or "log_normalisers" not in self.tensors:
            return KeptPatterns(self)
        return RecomputedPatterns(self)

    @cached_property
    def recomputing(self) -> dict[str, Any]:
        """What patterns that are computed again keep between two readings."""
        return {}

    def pattern(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """The attention patterns of one layer."""
        return self.attention.of_layer(layer)

    # -- components ------------------------------------------------------------------------------------------

    @property
    def positions_apart(self) -> bool:
        """Whether what positions add before layer 0 is a component of its own (``position``), beside ``embedding``."""
        return "position_embedding" in self.tensors

    def with_positions_joined(self) -> Recording:
        """The same with one component before layer 0: ``embedding`` is then the sum of token and position, as it was
        before headtrace told them apart, and as other implementations have it."""
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n != "position_embedding"})

    @cached_property
    def embedding(self) -> Float[Tensor, "batch token d_model"]:
        """What tokens write before layer 0, scaled as the model does: all that is there then, without what positions
        add where that is a component of its own."""
        first = self.residuals[0]
        return first - self.tensors["position_embedding"] if self.positions_apart else first

    def attention_bias(self, layer: int) -> Float[Tensor, "batch token d_model"]:
        """The constant write of a layer: output bias, and value biases through W_O."""
        bias = self.model.weights.attention_bias[layer].expand_as(self.residuals[0])
        return self._after_post_norm(bias, layer)

    @cached_property
    def shared_values(self) -> Float[Tensor, "layer kv_head batch token d_head"]:
        """Value vectors without their bias, as query heads share them, all prompts of a head together."""
        return self.values.transpose(1, 2).contiguous() - self.model.weights.b_V[:, :, None, None]

    @cached_property
    def bare_values(self) -> Float[Tensor, "layer head batch token d_head"]:
        """Value vectors without their bias, one row per query head."""
        group = self.model.weights.group
        return self.shared_values if group == 1 else self.shared_values.repeat_interleave(group, dim=1)

    @cached_property
    def visible_keys(self) -> Int[Tensor, "layer batch token"]:
        """How many keys each destination sees."""
        counts = {id(mask): mask.sum(dim=-1) for mask in self.visible}
        return torch.stack([counts[id(mask)] for mask in self.visible])

    @cached_property
    def plain_writes(self) -> Float[Tensor, "batch layer_and_embedding token d_model"]:
        """What is written at every token without looking at others: the embedding, what positions add (where that is
        apart), then each layer's MLP."""
        # Laid out prompt by prompt, so that what is below a layer is one block in memory.
        first = (
            [self.embedding, self.tensors["position_embedding"]] if self.positions_apart else [self.embedding]
        )
        layers, batch, *rest = self.mlp_writes.shape
        writes = self.residuals.new_empty(batch, len(first) + layers, *rest)
        for row, write in enumerate(first):
            writes[:, row] = write
        writes[:, len(first) :] = self.mlp_writes.transpose(0, 1)
        return writes

    def keep_head_writes(self) -> None:
        """Keep ``head_writes`` because many of them will be read, if they are fewer numbers than ``W_O`` has: those of
        one short prompt or a few."""
        W_O, (batch, length) = self.model.weights.W_O, self.token_ids.shape
        n_layers, n_heads, d_head, d_model = W_O.shape
        if self.head_writes is None and batch * length <= d_head:
            writes = self.bare_values.new_empty(batch, n_layers, n_heads, length, d_model)
            for prompt, own in enumerate(writes):
                torch.matmul(self.bare_values[:, :, prompt], W_O, out=own)
            object.__setattr__(self, "head_writes", writes)

    @cached_property
    def moved_norms(self) -> Float[Tensor, "layer head batch token"]:
        """How long the write of each head is for each source, if it attends to nothing else: ``|v[j] W_O|``."""
        if self.head_writes is not None:
            return torch.linalg.vector_norm(self.head_writes, dim=-1).movedim(0, 2)
        W_O = self.model.weights.W_O
        gram = W_O @ W_O.mT
        values = self.bare_values
        squares = ((values.flatten(2, 3) @ gram) * values.flatten(2, 3)).sum(-1)
        return squares.clamp_min(0).sqrt().unflatten(2, values.shape[2:4])

    def write(self, component: Component, prompt: int | None = 0, dest: int | None = None) -> Tensor:
        """What a component wrote to every token of a prompt: (token, d_model).

        With ``dest``, what it wrote at that position only; with ``prompt=None``, what it wrote in every prompt. A head
        component names the source it read (``src``); without one, the whole head's write is given.
        """
        kind, layer, head, src = component.kind, component.layer, component.head, component.src
        b = slice(None) if prompt is None else prompt
        t = dest if dest is not None else slice(None if prompt is None else self.lengths[prompt])
        if kind == "embedding":
            return self.embedding[b, t]
        if kind == "position":
            return self._position_write()[b, t]
        n_layers, weights = self.model.n_layers, self.model.weights
        if kind == "offset" or (kind == "rounding" and layer == n_layers):
            # A reader's bias and the rounding of the output logits are not written into the residual.
            return torch.zeros_like(self.embedding[b, t])
        if layer is None or not 0 <= layer < n_layers:
            raise InputError(f"{component} has no write: the model has layers 0 to {n_layers - 1}.")
        if kind == "mlp":
            return self.mlp_writes[layer, b, t]
        if kind == "rounding":
            return self.roundings[layer, b, t]
        if kind == "attention_bias":
            written = weights.attention_bias[layer].expand_as(self.embedding)[b, t]
        elif kind != "head" or head is None or not 0 <= head < self.model.n_heads:
            raise InputError(f"{component} does not write into the residual.")
        else:
            values = self.bare_values[layer, head, b]
            if src is None:
                rows = self.attention.of_head(layer, head)[b, t]
                mixed = rows @ values if dest is None else (rows[..., None, :] @ values)[..., 0, :]
            else:
                batch, length = self.token_ids.shape
                tokens = t if isinstance(t, int) else torch.arange(length, device=values.device)[t]
                prompts = b if isinstance(b, int) else torch.arange(batch, device=values.device)[:, None]
                strength = self.attention.at(layer, prompts, head, tokens, src)
                mixed = strength[..., None] * values[..., src : src + 1, :]
                mixed = mixed if dest is None else mixed[..., 0, :]
            written = mixed @ weights.W_O[layer, head]
        post = self.post_norm_scales
        return written if post is None else written / post[layer, b, t, None]

    def _position_write(self) -> Float[Tensor, "batch token d_model"]:
        if self.positions_apart:
            return self.tensors["position_embedding"]
        if self.model.architecture.position_embedding is not None:
            raise InputError(
                "In this recording position embeddings are part of the embedding. Record the prompt again "
                "to tell them apart."
            )
        raise InputError(
            f"{self.model.name!r} has no position embeddings, so no component of the kind position writes."
        )

    def writes(self, sites: Sequence[Site], prompt: int = 0) -> Float[Tensor, "site d_model"]:
        """What some sites of a prompt wrote, each at its own position."""
        heads = [row for row, site in enumerate(sites) if site.kind == "head" and site.src is not None]
        mlps = [row for row, site in enumerate(sites) if site.kind == "mlp"]
        some = {*heads, *mlps}
        made = self.embedding.new_empty(len(sites), self.embedding.shape[-1])
        for row in (row for row in range(len(sites)) if row not in some):
            made[row] = self.write(sites[row].component, prompt, sites[row].dest or 0)
        if mlps:
            at = torch.tensor(
                [(sites[row].layer or 0, sites[row].dest or 0) for row in mlps], device=made.device
            )
            made[mlps] = self.mlp_writes[at[:, 0], prompt, at[:, 1]]
        for first in range(0, len(heads), WRITES_AT_ONCE):
            rows = heads[first : first + WRITES_AT_ONCE]
            made[rows] = self._head_writes([sites[row] for row in rows], prompt)
        return made

    def _head_writes(self, sites: Sequence[Site], prompt: int) -> Float[Tensor, "site d_model"]:
        """What head components that read one source wrote."""
        places = [(site.layer or 0, site.head or 0, site.dest or 0, site.src or 0) for site in sites]
        layer, head, dest, src = torch.tensor(places, device=self.embedding.device).unbind(1)
        strength = self.attention.at(layer, torch.full_like(layer, prompt), head, dest, src)
        if self.head_writes is None:
            moved = self.bare_values[layer, head, prompt, src][:, None]
            moved = (moved @ self.model.weights.W_O[layer, head])[:, 0]
        else:
            moved = self.head_writes[prompt, layer, head, src]
        written, post = strength[:, None] * moved, self.post_norm_scales
        return written if post is None else written / post[layer, prompt, dest, None]

    def layer_writes(self, layer: int) -> Float[Tensor, "batch token d_model"]:
        """All that a layer adds to the residual, put together from its components."""
        mixed = self.attention.mixed(layer, self.bare_values[layer].transpose(0, 1))
        heads = torch.einsum("bhtr,hrd->btd", mixed, self.model.weights.W_O[layer])
        return self._after_post_norm(heads, layer) + self.attention_bias(layer) + self.mlp_writes[layer]

    # -- half precision --------------------------------------------------------------------------------------

    @cached_property
    def roundings(self) -> Float[Tensor, "layer batch token d_model"]:
        """What rounding added to the residual in each layer of a model that runs in half precision: what is there
        behind the layer, less what was there before it and what the layer's components wrote, all in float32."""
        made = torch.empty_like(self.mlp_writes)
        for layer in range(self.model.n_layers):
            made[layer] = self.residuals[layer + 1] - self.residuals[layer] - self.layer_writes(layer)
        require_rounding(self, "residual", made, self.residuals[1:])
        return made

    @cached_property
    def _reading_roundings(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def reading_roundings(
        self, layer: int
    ) -> tuple[Float[Tensor, "batch head token d_head"], Float[Tensor, "batch kv_head token d_head"]]:
        """What rounding added to the queries and keys of a layer, while they were read from the residual."""
        if layer not in self._reading_roundings:
            queries, keys = folded_queries_keys(self, self.residuals[layer], layer)
            found = self.queries[layer] - queries, self.keys[layer] - keys
            require_rounding(self, "queries", found[0], self.queries[layer], layer)
            require_rounding(self, "keys", found[1], self.keys[layer], layer)
            self._reading_roundings[layer] = found
        return self._reading_roundings[layer]

    @cached_property
    def _value_roundings(self) -> dict[int, Tensor]:
        return {}

    def value_roundings(self, layer: int) -> Float[Tensor, "batch kv_head token d_head"]:
        """What rounding added to the values of a layer, while they were read from the residual."""
        if layer not in self._value_roundings:
            weights, xhat = self.model.weights, self.residuals[layer] / self.norm_scales[layer][..., None]
            values = torch.einsum("btd,hdr->bhtr", xhat, weights.W_V[layer]) + weights.b_V[layer][:, None]
            found = self.values[layer] - values
            require_rounding(self, "values", found, self.values[layer], layer)
            self._value_roundings[layer] = found
        return self._value_roundings[layer]

    def _after_post_norm(self, write: Tensor, layer: int) -> Tensor:
        return write if self.post_norm_scales is None else write / self.post_norm_scales[layer][..., None]

    # -- attention scores ------------------------------------------------------------------------------------

    def raw_logits(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """Attention logits before softcap and mask: ``scale * q . k``."""
        keys = self.keys[layer].repeat_interleave(self.model.weights.group, dim=1)
        return (self.queries[layer] @ keys.transpose(-1, -2)) * self.scales[layer]

    def attention_logits(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """Attention logits as the softmax sees them: after softcap, minus infinity where a key is not visible."""
        logits = softcap(self.raw_logits(layer), self.softcaps[layer])
        return logits.masked_fill(~self.visible[layer][:, None], -torch.inf)

    # -- checks and files ------------------------------------------------------------------------------------

    def check(self, tolerance: float | None = None) -> IdentityReport:
        """Verify that the tokens give the first residual, components sum to all others, folded q.k gives the attention
        logits, those give the patterns, and shares give the output."""
        return check_identities(self, tolerance)

    def save(self, folder: str | Path) -> None:
        """Write ``recording.safetensors`` and ``recording.json`` into a folder."""
        from headtrace.models.recording_files import save_recording

        save_recording(self, folder)

    @staticmethod
    def load(folder: str | Path, model: Model) -> Recording:
        """Read a saved recording; the model must be the one it was made with."""
        from headtrace.models.recording_files import load_recording

        return load_recording(folder, model)


Recording.FIELDS = {name: field for name, field in vars(Recording).items() if isinstance(field, Recorded)}


def _rows(x: Tensor, one: slice) -> Tensor:
    """Rotary tables come with one row for all prompts, or one for each."""
    return x if x.shape[0] == 1 else x[one]
