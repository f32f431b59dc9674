"""The observer that makes a recording: it fills preallocated tensors while the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headtrace.errors import UnsupportedModelError
from headtrace.models.fields import BLOCK, Recorded
from headtrace.models.norms import norm_eps, norm_scale
from headtrace.models.observer import AttentionCall, NormPlace, Observer, Rotary

if TYPE_CHECKING:
    from headtrace.models.model import Model

_SCALES: dict[NormPlace, str] = {
    "query": "query_scales",
    "key": "key_scales",
    "attention_post_norm": "post_norm_scales",
    "mlp_norm": "mlp_norm_scales",
    "mlp_post_norm": "mlp_post_norm_scales",
}


_HIDDEN = -1e4
"""A mask hides a key by adding less than this to its score."""


class Capture(Observer):
    """Copies what is wanted into tensors whose first axis is the layer."""

    def __init__(self, model: Model, fields: Mapping[str, Recorded], sizes: Mapping[str, int]) -> None:
        self.model, self.sizes = model, sizes
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(field.shape(sizes), dtype=field.dtype or model.dtype, device=model.device)
            for name, field in fields.items()
        }
        if model.architecture.mlp_norm is None and "mlp_norm_scales" in self.tensors:
            self.tensors["mlp_norm_scales"].fill_(1.0)
        self.rotary: list[Rotary | None] = []
        self.visible: list[Tensor] = []
        self.scales: list[float] = []
        self.softcaps: list[float | None] = []
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}

    def wants(self, place: str) -> bool:
        """Places whose tensors are not kept need no hook."""
        needed = {"mlp_input": ("mlp_inputs",), "mlp_write": ("mlp_writes",), "norm_input": _SCALES.values()}
        return super().wants(place) and (place not in needed or any(n in self.tensors for n in needed[place]))

    def _keep(self, name: str, layer: int, tensor: Tensor) -> None:
        if name in self.tensors:
            self.tensors[name][layer] = tensor

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> None:
        self._keep("residuals", layer, residual)
        self.rotary.append(rotary)

    def final_input(self, residual: Tensor) -> None:
        self._keep("residuals", -1, residual)

    def pattern_buffer(self, call: AttentionCall) -> Tensor | None:
        return self.tensors["patterns"][call.layer] if "patterns" in self.tensors else None

    def takes_rows(self) -> bool:
        return "patterns" not in self.tensors

    def needs_rows(self) -> bool:
        return "log_normalisers" in self.tensors

    def see_rows(self, call: AttentionCall, first: int, logits: Tensor, pattern: Tensor) -> None:
        rows = slice(first, first + pattern.shape[2])
        if "patterns" in self.tensors:
            self.tensors["patterns"][call.layer, :, :, rows] = pattern
        if "log_normalisers" in self.tensors:
            self.tensors["log_normalisers"][call.layer, :, :, rows] = logits.logsumexp(dim=-1)
        if "column_maxima" in self.tensors:
            for start in range(first // BLOCK * BLOCK, first + pattern.shape[2], BLOCK):
                mine = pattern[:, :, max(start - first, 0) : start + BLOCK - first]
                into = self.tensors["column_maxima"][call.layer, :, :, start // BLOCK]
                largest = mine.amax(dim=2)
                # A block that the rows before have begun goes on.
                into.copy_(torch.maximum(into, largest) if start < first else largest)

    def rows_seen(self, call: AttentionCall) -> None:
        self._take(call)

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        self._take(call)

    def _take(self, call: AttentionCall) -> None:
        scale = call.scale
        if self.model.architecture.query_prescaled:
            scale = self.model.d_head**-0.5
            if "queries" in self.tensors:
                self._keep("queries", call.layer, call.query / scale)
        else:
            self._keep("queries", call.layer, call.query)
        self._keep("keys", call.layer, call.key)
        self._keep("values", call.layer, call.value)
        self.scales.append(scale)
        self.softcaps.append(call.softcap)
        self.visible.append(self._visible(call.mask))

    def _visible(self, mask: Tensor | None) -> Tensor:
        """Which keys each destination sees. Layers that share a mask share the tensor."""
        batch, length = self.sizes["batch"], self.sizes["token"]
        if mask is None:
            causal = torch.ones(length, length, dtype=torch.bool, device=self.model.device)
            return causal.tril().expand(batch, -1, -1)
        if id(mask) not in self._masks:
            if bool(((mask != 0) & (mask > _HIDDEN)).any()):
                raise UnsupportedModelError(
                    f"{self.model.name!r} adds numbers to the attention scores of visible keys (positions as biases, "
                    "as ALiBi does?). No component writes them, so scores cannot be decomposed exactly."
                )
            self._masks[id(mask)] = (mask, (mask == 0)[:, 0].expand(batch, -1, -1).to(self.model.device))
        return self._masks[id(mask)][1]

    def mlp_input(self, layer: int, read: Tensor) -> None:
        self._keep("mlp_inputs", layer, read)

    def mlp_write(self, layer: int, write: Tensor) -> None:
        self._keep("mlp_writes", layer, write)

    def norm_input(self, place: NormPlace, layer: int, x: Tensor, norm: nn.Module) -> None:
        if _SCALES[place] not in self.tensors:
            return
        facts, target = self.model.architecture, self.tensors[_SCALES[place]][layer]
        if place not in ("query", "key"):
            target.copy_(norm_scale(x, norm_eps(norm), facts.norm).reshape(target.shape))
            return
        scale = norm_scale(x, norm_eps(norm), facts.query_key_norm_kind)
        if facts.query_key_norm_axes == "token projection":
            scale = scale[:, None]
        elif facts.query_key_norm_axes == "token head d_head":
            scale = scale.transpose(1, 2)
        target.copy_(scale.expand_as(target))
