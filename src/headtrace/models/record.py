"""One forward pass of a model, recorded: the observer that fills the tensors, and the memory they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.errors import InputError, OutOfMemoryError, UnsupportedModelError
from headtrace.models.attention import SCORES_AT_ONCE
from headtrace.models.devices import available_bytes
from headtrace.models.forward import forward
from headtrace.models.observer import AttentionCall, NormPlace, Observer, Rotary
from headtrace.models.patterns import BLOCK
from headtrace.models.recorded_fields import Recorded, axis_sizes, choose
from headtrace.models.recording import Recording
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.tables import human

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

    def watches(self, place: str) -> bool:
        """Places whose tensors are not kept need no hook."""
        needed = {"mlp_input": ("mlp_inputs",), "mlp_write": ("mlp_writes",), "norm_input": _SCALES.values()}
        return super().watches(place) and (
            place not in needed or any(n in self.tensors for n in needed[place])
        )

    def _keep(self, name: str, layer: int, tensor: Tensor) -> None:
        if name in self.tensors:
            self.tensors[name][layer] = tensor

    def position_embedding(self, write: Tensor) -> None:
        if "position_embedding" in self.tensors:
            self.tensors["position_embedding"].copy_(write)

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
            scale = self.model.head_sizes[call.layer] ** -0.5
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


@torch.inference_mode()
def record(
    model: Model,
    token_ids: Int[Tensor, "batch token"],
    lengths: tuple[int, ...],
    *,
    last_logits: int = 0,
    keep: Iterable[str] | None = None,
    observers: Sequence[Observer] = (),
) -> Recording:
    """Run the model once on right-padded token ids; logits at each prompt's last positions (0: everywhere).

    What ``observers`` change is recorded as it is then: such a recording need not add up.
    """
    batch, length = token_ids.shape
    positions = _logit_positions(lengths, length, last_logits).to(token_ids.device)
    fields = choose(Recording.FIELDS, keep, model)
    wanted = {n: f for n, f in fields.items() if n not in Recording.ALWAYS and n != "norm_scales"}
    if "norm_scales" in fields:
        wanted["residuals"] = Recording.FIELDS["residuals"]
    seen = Capture(model, wanted, axis_sizes(model, batch, length, positions.shape[1]))
    logits = forward(
        model, token_ids, *observers, seen, lengths=lengths, keep=positions if last_logits else None
    )
    tensors = {"token_ids": token_ids, "logits": logits, "logit_positions": positions, **seen.tensors}
    if "norm_scales" in fields:
        tensors["norm_scales"] = _norm_scales(model, tensors["residuals"])
    return Recording(
        model=model,
        lengths=lengths,
        tensors={n: t for n, t in tensors.items() if n in fields or n in Recording.ALWAYS},
        rotary=tuple(seen.rotary),
        visible=tuple(seen.visible),
        scales=tuple(seen.scales),
        softcaps=tuple(seen.softcaps),
    )


PatternsKept = Literal["keep", "recompute", "auto"]
PATTERNS_BYTES = 2_000_000_000
"""Patterns that take more than this are computed again, unless it is said otherwise."""
INSTEAD = ("queries", "keys", "log_normalisers", "column_maxima")
"""What patterns are computed from."""


def patterns_kept(
    model: Model, keep: Iterable[str] | None, patterns: PatternsKept, batch: int, length: int
) -> list[str] | None:
    """The tensors to record, with patterns or with what they are computed from."""
    if patterns not in get_args(PatternsKept):
        raise InputError(f"patterns={patterns!r}: choose {', '.join(map(repr, get_args(PatternsKept)))}.")
    size = model.n_layers * batch * model.n_heads * length**2 * torch.finfo(model.dtype).bits // 8
    names = list(choose(Recording.FIELDS, keep, model))
    asked = (
        keep is not None and "patterns" in names and "queries" not in names
    )  # for themselves, not for a trace
    if (
        patterns == "keep"
        or (patterns == "auto" and (size <= PATTERNS_BYTES or asked))
        or "patterns" not in names
    ):
        return None if keep is None else names
    return [name for name in names if name != "patterns"] + [name for name in INSTEAD if name not in names]


def _logit_positions(lengths: tuple[int, ...], width: int, last: int) -> Int[Tensor, "batch kept"]:
    """Each prompt's last positions (a prompt shorter than that repeats its first), or all of them."""
    if not last:
        return torch.arange(width).expand(len(lengths), -1)
    ends = torch.tensor(lengths)[:, None] - last
    return (ends + torch.arange(last)).clamp_min(0)


def _norm_scales(model: Model, residuals: Tensor) -> Float[Tensor, "layer_and_final batch token"]:
    """Frozen scales of the norms before attention and of the final norm (one where there is none)."""
    facts, scales = model.architecture, torch.ones_like(residuals[..., 0])
    if facts.attention_norm is not None:
        norms = [layer.get_submodule(facts.attention_norm) for layer in model.layers]
        eps = residuals.new_tensor([norm_eps(n) for n in norms])[:, None, None]
        scales[:-1] = norm_scale(residuals[:-1], eps, facts.norm)
    if facts.final_norm is not None:
        scales[-1] = norm_scale(residuals[-1], norm_eps(model.hf.get_submodule(facts.final_norm)), facts.norm)
    return scales


def recording_bytes(
    model: Model, length: int, batch: int = 1, logits: int | None = None, keep: Iterable[str] | None = None
) -> int:
    """Bytes that a recording of ``batch`` prompts of ``length`` tokens takes at its peak, weights not included."""
    kept = length if logits is None else logits
    sizes = axis_sizes(model, batch, length, kept)
    fields = choose(Recording.FIELDS, keep, model)
    recorded = sum(math.prod(fields[name].shape(sizes)) for name in fields)
    # While a layer runs: scores and their softmax, the MLP's hidden units, and the output logits once more.
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    scores = 3 * batch * model.n_heads * length**2
    if "patterns" not in fields:  # then some rows at a time, and masks of all pairs
        scores = min(scores, 6 * SCORES_AT_ONCE) + 2 * batch * length**2
    working = scores + batch * (4 * length * hidden + kept * model.d_output)
    return torch.finfo(model.dtype).bits // 8 * (recorded + working)


def tracing_bytes(model: Model, length: int) -> int:
    """Bytes that tracing one firing of a prompt takes at its peak, its recording included, weights not: what is read of
    every upstream value on both sides, values and plain writes by prompt, and contributions over tokens."""
    keep = patterns_kept(model, None, "auto", 1, length)
    d_head, width = model.d_head, torch.finfo(model.dtype).bits // 8
    upstream = model.n_layers * model.n_heads * length * d_head
    plain = (model.n_layers + 1) * length * (model.d_model + 4 * d_head)
    return recording_bytes(model, length, 1, 1, keep) + width * (3 * upstream + plain)


def require_memory(
    model: Model, length: int, batch: int, logits: int | None, keep: Iterable[str] | None = None
) -> None:
    """Stop before the run if the estimate is more than there is."""
    needed = recording_bytes(model, length, batch, logits, keep)
    on_gpu = model.device.type == "cuda"
    available = torch.cuda.mem_get_info(model.device)[0] if on_gpu else available_bytes()
    if needed > available:
        raise OutOfMemoryError(
            f"Recording {batch} prompt(s) of {length} tokens needs about {human(needed)}, and {human(available)} is "
            "available. Shorten the prompt, record fewer prompts at once, or use a machine with more memory."
        )
