"""One forward pass -> Recording: every residual as the exact sum of what was written into it.

    recording = model.record("When Mary and John went to the store, John gave a drink to")
    recording.check()                                   # the identities, verified
    recording.patterns[9, 0, 6]                         # attention of L9H6: (dest, src)
    recording.write(Component("head", 5, 3, src=2))     # what L5H3 wrote from position 2: (token, d_model)

Tensors have the axes (layer, batch, ...). Prompts of different lengths are padded on the right, where no real token
can see; ``recording[i]`` is the recording of one prompt without padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.capture import Rotary, capture
from headtrace.models.identities import IdentityReport, check_identities
from headtrace.models.view import norm_eps
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from pathlib import Path

    from headtrace.models.model import Model


@dataclass(frozen=True, eq=False)
class Recording:
    """What one forward pass wrote, read and attended to. Made by ``Model.record``."""

    model: Model
    token_ids: Int[Tensor, "batch token"]
    lengths: tuple[int, ...]
    logits: Float[Tensor, "batch kept vocab"]
    """Output logits: at every position, or (``last_logits=True``) at each prompt's last one only."""
    residuals: Float[Tensor, "layer_and_final batch token d_model"]
    """The residual at the input of every layer; the last row is the input of the final norm."""
    queries: Float[Tensor, "layer batch head token d_head"]
    keys: Float[Tensor, "layer batch kv_head token d_head"]
    values: Float[Tensor, "layer batch kv_head token d_head"]
    """Queries, keys and values as attention uses them: after biases, QK-norm and rotary positions."""
    patterns: Float[Tensor, "layer batch head dest src"]
    mlp_writes: Float[Tensor, "layer batch token d_model"]
    norm_scales: Float[Tensor, "layer_and_final batch token"]
    """The frozen scale of the norm before each layer's attention, and of the final norm."""
    post_norm_scales: Float[Tensor, "layer batch token"] | None
    query_scales: Float[Tensor, "layer batch head token"] | None
    key_scales: Float[Tensor, "layer batch kv_head token"] | None
    rotary: tuple[Rotary | None, ...]
    visible: tuple[Bool[Tensor, "batch dest src"], ...]
    """Per layer, which keys each destination sees (causal, sliding window)."""
    scales: tuple[float, ...]
    softcaps: tuple[float | None, ...]

    @classmethod
    @torch.inference_mode()
    def make(
        cls,
        model: Model,
        token_ids: Int[Tensor, "batch token"],
        lengths: tuple[int, ...],
        *,
        last_logits: bool,
    ) -> Recording:
        """Run the model once on right-padded token ids."""
        ends = torch.tensor([n - 1 for n in lengths], device=token_ids.device)
        kept, where = torch.unique(ends, return_inverse=True)
        seen, logits = capture(model, token_ids, lengths, kept if last_logits else None)
        if last_logits:
            logits = logits[torch.arange(len(lengths), device=logits.device), where][:, None]
        return cls(
            model=model,
            token_ids=token_ids,
            lengths=lengths,
            logits=logits,
            residuals=seen.residuals,
            queries=seen.queries,
            keys=seen.keys,
            values=seen.values,
            patterns=seen.patterns,
            mlp_writes=seen.mlp_writes,
            norm_scales=_norm_scales(model, seen.residuals),
            post_norm_scales=seen.post_norm_scales,
            query_scales=seen.query_scales,
            key_scales=seen.key_scales,
            rotary=tuple(seen.rotary),
            visible=tuple(seen.visible),
            scales=tuple(seen.scales),
            softcaps=tuple(seen.softcaps),
        )

    # -- one prompt ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, prompt: int) -> Recording:
        """The recording of one prompt, without padding (a view: nothing is copied)."""
        if not -len(self) <= prompt < len(self):
            raise InputError(f"There is no prompt {prompt} in this recording of {len(self)}.")
        b = prompt % len(self)
        n, one = self.lengths[b], slice(b, b + 1)

        def cut(x: Tensor | None) -> Any:
            return None if x is None else x[:, one, ..., :n]

        return replace(
            self,
            token_ids=self.token_ids[one, :n],
            lengths=(n,),
            logits=self.logits[one, :n],
            residuals=self.residuals[:, one, :n],
            queries=self.queries[:, one, :, :n],
            keys=self.keys[:, one, :, :n],
            values=self.values[:, one, :, :n],
            patterns=self.patterns[:, one, :, :n, :n],
            mlp_writes=self.mlp_writes[:, one, :n],
            norm_scales=cut(self.norm_scales),
            post_norm_scales=cut(self.post_norm_scales),
            query_scales=cut(self.query_scales),
            key_scales=cut(self.key_scales),
            rotary=tuple(
                None if r is None else Rotary(_rows(r.cos, one)[:, :n], _rows(r.sin, one)[:, :n])
                for r in self.rotary
            ),
            visible=tuple(v[one, :n, :n] for v in self.visible),
        )

    def tokens(self, prompt: int = 0) -> tuple[str, ...]:
        """Readable text of one prompt's tokens."""
        return self.model.token_labels(self.token_ids[prompt, : self.lengths[prompt]].tolist())

    def last_logits(self, prompt: int = 0) -> Float[Tensor, " vocab"]:
        """Output logits at the prompt's last position."""
        kept_all = self.logits.shape[1] == self.token_ids.shape[1]
        return self.logits[prompt, self.lengths[prompt] - 1 if kept_all else 0]

    def top_answers(self, k: int = 5, prompt: int = 0) -> list[tuple[str, int, float]]:
        """The k likeliest next tokens: text, id and probability."""
        values, ids = self.last_logits(prompt).softmax(-1).topk(k)
        labels = self.model.token_labels(ids.tolist())
        return list(zip(labels, ids.tolist(), values.tolist(), strict=True))

    def strongest_firings(self, prompt: int = 0, *, skip_first: bool = True) -> list[tuple[Firing, float]]:
        """Every head's strongest firing: where it attends most, by default past the first token (the usual sink)."""
        n, first = self.lengths[prompt], 1 if skip_first and self.lengths[prompt] > 1 else 0
        flat = self.patterns[:, prompt, :, first:n, first:n].flatten(2)
        values, places = flat.max(dim=-1)
        width = n - first
        return [
            (Firing(layer, head, int(place) // width + first, int(place) % width + first), float(value))
            for layer, (row, spots) in enumerate(zip(values, places, strict=True))
            for head, (value, place) in enumerate(zip(row, spots, strict=True))
        ]

    # -- components ------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> Float[Tensor, "batch token d_model"]:
        """Everything present before layer 0: token and position, scaled as the model does."""
        return self.residuals[0]

    def attention_bias(self, layer: int) -> Float[Tensor, "batch token d_model"]:
        """The constant write of a layer: output bias, and value biases through W_O."""
        bias = self.model.weights.attention_bias[layer].expand_as(self.residuals[0])
        return self._after_post_norm(bias, layer)

    @cached_property
    def bare_values(self) -> Float[Tensor, "layer batch head token d_head"]:
        """Value vectors without their bias, one row per query head."""
        weights = self.model.weights
        bare = self.values.transpose(0, 1) - weights.b_V[None, :, :, None]
        # Laid out prompt by prompt, so that the layers below a head are one block in memory.
        return bare.repeat_interleave(weights.group, dim=2).transpose(0, 1)

    def write(self, component: Component, prompt: int | None = 0) -> Tensor:
        """What a component wrote to every token: (token, d_model), or all prompts' with ``prompt=None``.

        A head component names the source it read (``src``); without one, the whole head's write is given.
        """
        written = self._write(component)
        return written if prompt is None else written[prompt, : self.lengths[prompt]]

    def _write(self, component: Component) -> Float[Tensor, "batch token d_model"]:
        kind, layer, head, src = component.kind, component.layer, component.head, component.src
        if kind == "embedding":
            return self.embedding
        if layer is None or not 0 <= layer < self.model.n_layers:
            raise InputError(
                f"{component} has no write: the model has layers 0 to {self.model.n_layers - 1}."
            )
        if kind == "mlp":
            return self.mlp_writes[layer]
        if kind == "attention_bias":
            return self.attention_bias(layer)
        if kind != "head" or head is None or not 0 <= head < self.model.n_heads:
            raise InputError(f"{component} is not something that writes into the residual.")
        pattern, values = self.patterns[layer][:, head], self.bare_values[layer][:, head]
        mixed = pattern @ values if src is None else pattern[:, :, src, None] * values[:, None, src]
        return self._after_post_norm(mixed @ self.model.weights.W_O[layer, head], layer)

    def layer_writes(self, layer: int) -> Float[Tensor, "batch token d_model"]:
        """All that a layer adds to the residual, put together from its components."""
        mixed = self.patterns[layer] @ self.bare_values[layer]
        heads = torch.einsum("bhtr,hrd->btd", mixed, self.model.weights.W_O[layer])
        return self._after_post_norm(heads, layer) + self.attention_bias(layer) + self.mlp_writes[layer]

    def _after_post_norm(self, write: Tensor, layer: int) -> Tensor:
        return write if self.post_norm_scales is None else write / self.post_norm_scales[layer][..., None]

    # -- attention scores ------------------------------------------------------------------------------------

    def raw_logits(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """Attention logits before softcap and mask: ``scale * q . k``."""
        keys = self.keys[layer].repeat_interleave(self.model.weights.group, dim=1)
        return (self.queries[layer] @ keys.transpose(-1, -2)) * self.scales[layer]

    def attention_logits(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """Attention logits as the softmax sees them: after softcap, minus infinity where a key is not visible."""
        logits, cap = self.raw_logits(layer), self.softcaps[layer]
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.masked_fill(~self.visible[layer][:, None], -torch.inf)

    # -- checks and files ------------------------------------------------------------------------------------

    def check(self, tolerance: float | None = None) -> IdentityReport:
        """Verify that components sum to residuals, folded q.k gives the attention logits, shares give the output."""
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

    def tensors(self) -> dict[str, Tensor]:
        """The recorded tensors by name."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}


def _rows(x: Tensor, one: slice) -> Tensor:
    """Rotary tables come with one row for all prompts, or one for each."""
    return x if x.shape[0] == 1 else x[one]


def _norm_scales(model: Model, residuals: Tensor) -> Float[Tensor, "layer_and_final batch token"]:
    """Frozen scales of the norms before attention (one where there is none) and of the final norm."""
    facts = model.architecture
    final = model.hf.get_submodule(facts.final_norm)
    norms: list[Any] = [final]
    if facts.attention_norm is not None:
        layers = model.hf.get_submodule(facts.layers).children()
        norms = [layer.get_submodule(facts.attention_norm) for layer in layers] + [final]
    eps = torch.tensor([norm_eps(n) for n in norms], dtype=residuals.dtype, device=residuals.device)[
        :, None, None
    ]
    rows = residuals if facts.attention_norm is not None else residuals[-1:]
    if facts.norm == "layer":
        scales = (rows.var(dim=-1, unbiased=False) + eps).sqrt()
    else:
        scales = (rows.square().mean(dim=-1) + eps).sqrt()
    if facts.attention_norm is None:
        scales = torch.cat((torch.ones_like(scales).expand(model.n_layers, -1, -1), scales))
    return scales
