"""One forward pass of the model itself, seen by an attention observer and a few forward hooks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.models.attention import AttentionCall, AttentionObserver, through
from headtrace.models.view import norm_eps, norm_gain, norm_scale, rms_scale

if TYPE_CHECKING:
    from headtrace.models.model import Model


@dataclass(frozen=True)
class Rotary:
    """Rotary positions as the model made them for one layer: ``q <- q * cos + rotate(q) * sin``."""

    cos: Float[Tensor, "batch token rotary"]
    sin: Float[Tensor, "batch token rotary"]

    def rotate(self, x: Float[Tensor, "batch head token d_head"]) -> Float[Tensor, "batch head token d_head"]:
        """Turn queries or keys as the model does; dimensions beyond the rotary ones stay."""
        width = self.cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        half = width // 2
        quarter_turn = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = turned * self.cos[:, None] + quarter_turn * self.sin[:, None]
        return torch.cat((turned, rest), dim=-1)


@dataclass
class Capture(AttentionObserver):
    """Fills preallocated tensors while the model runs. Layers are the first axis of everything."""

    model: Model
    batch: int
    length: int
    residuals: Tensor = field(init=False)
    queries: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)
    patterns: Tensor = field(init=False)
    mlp_writes: Tensor = field(init=False)
    post_norm_scales: Tensor | None = field(init=False, default=None)
    query_scales: Tensor | None = field(init=False, default=None)
    key_scales: Tensor | None = field(init=False, default=None)
    rotary: list[Rotary | None] = field(init=False, default_factory=list[Rotary | None])
    visible: list[Tensor] = field(init=False, default_factory=list[Tensor])
    masks: dict[int, tuple[Tensor, Tensor]] = field(
        init=False, default_factory=dict[int, tuple[Tensor, Tensor]]
    )
    scales: list[float] = field(init=False, default_factory=list[float])
    softcaps: list[float | None] = field(init=False, default_factory=list[float | None])

    def __post_init__(self) -> None:
        m, B, T = self.model, self.batch, self.length
        L, H, KV, d, r = m.n_layers, m.n_heads, m.n_kv_heads, m.d_model, m.d_head
        empty: Any = lambda *shape: torch.empty(shape, dtype=m.dtype, device=m.device)  # noqa: E731
        self.residuals, self.mlp_writes = empty(L + 1, B, T, d), empty(L, B, T, d)
        self.queries, self.keys, self.values = (
            empty(L, B, H, T, r),
            empty(L, B, KV, T, r),
            empty(L, B, KV, T, r),
        )
        self.patterns = empty(L, B, H, T, T)
        if m.architecture.attention_post_norm is not None:
            self.post_norm_scales = empty(L, B, T)
        if m.architecture.query_key_norm is not None:
            self.query_scales, self.key_scales = empty(L, B, H, T), empty(L, B, KV, T)

    # -- the attention function ------------------------------------------------------------------------------

    def pattern_buffer(self, call: AttentionCall) -> Tensor:
        return self.patterns[call.layer]

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        scale = call.scale
        if self.model.architecture.query_prescaled:
            scale = self.model.d_head**-0.5
            torch.div(call.query, scale, out=self.queries[call.layer])
        else:
            self.queries[call.layer] = call.query
        self.keys[call.layer] = call.key
        self.values[call.layer] = call.value
        self.scales.append(scale)
        self.softcaps.append(call.softcap)
        self.visible.append(self._visible(call.mask))

    def _visible(self, mask: Tensor | None) -> Tensor:
        """Which keys each destination sees. Layers that share a mask share the tensor."""
        if mask is None:
            causal = torch.ones(self.length, self.length, dtype=torch.bool, device=self.model.device)
            return causal.tril().expand(self.batch, -1, -1)
        if id(mask) not in self.masks:
            self.masks[id(mask)] = (mask, (mask == 0)[:, 0].expand(self.batch, -1, -1))
        return self.masks[id(mask)][1]

    # -- the hooks -------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Generator[None]:
        """Hooks in, attention through this observer; both undone afterwards."""
        hf, facts = self.model.hf, self.model.architecture
        with ExitStack() as stack:
            if self.model.dtype == torch.float64:  # first, so that the hooks below see what it returns
                stack.enter_context(full_precision_norms(self.model))
            for index, layer in enumerate(hf.get_submodule(facts.layers).children()):
                handles = [
                    layer.register_forward_pre_hook(self._layer_input(index), with_kwargs=True),
                    layer.get_submodule(facts.mlp_write).register_forward_hook(self._mlp_output(index)),
                ]
                if self.post_norm_scales is not None:
                    norm = layer.get_submodule(facts.attention_post_norm or "")
                    handles.append(norm.register_forward_pre_hook(self._post_norm_input(index)))
                if facts.query_key_norm is not None:
                    attention = layer.get_submodule(facts.attention)
                    for path, target in zip(
                        facts.query_key_norm, (self.query_scales, self.key_scales), strict=True
                    ):
                        norm = attention.get_submodule(path)
                        assert target is not None
                        handles.append(norm.register_forward_pre_hook(self._head_norm_input(target[index])))
                for handle in handles:
                    stack.callback(handle.remove)
            final = hf.get_submodule(facts.final_norm)
            stack.callback(final.register_forward_pre_hook(self._final_input).remove)
            stack.enter_context(through(self, hf))
            yield

    def _layer_input(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.residuals[index] = args[0] if args else kwargs["hidden_states"]
            positions = kwargs.get("position_embeddings")
            self.rotary.append(None if positions is None else Rotary(*positions))

        return hook

    def _final_input(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.residuals[-1] = args[0]

    def _mlp_output(self, index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            self.mlp_writes[index] = output.reshape(self.batch, self.length, -1)

        return hook

    def _post_norm_input(self, index: int) -> Any:
        def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
            assert self.post_norm_scales is not None
            self.post_norm_scales[index] = norm_scale(args[0], norm, self.model.architecture)

        return hook

    def _head_norm_input(self, target: Float[Tensor, "batch head token"]) -> Any:
        axes = self.model.architecture.query_key_norm_axes

        def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
            scale = rms_scale(args[0], norm_eps(norm))
            if axes == "token projection":
                scale = scale[:, None]
            elif axes == "token head d_head":
                scale = scale.transpose(1, 2)
            target.copy_(scale.expand_as(target))

        return hook


@contextmanager
def full_precision_norms(model: Model) -> Generator[None]:
    """Let a float64 model's RMSNorms compute in float64.

    transformers rounds to float32 inside RMSNorm whatever the model's dtype, so that a float64 model would be exact
    to seven digits only; with this it is a float64 model throughout.
    """
    facts, hf = model.architecture, model.hf
    if facts.norm == "layer":
        yield
        return

    def hook(norm: nn.Module, args: tuple[Any, ...], _: Tensor) -> Tensor:
        x: Tensor = args[0]
        return x / rms_scale(x, norm_eps(norm))[..., None] * norm_gain(norm, facts)

    kind = type(hf.get_submodule(facts.final_norm))
    handles = [m.register_forward_hook(hook) for m in hf.modules() if isinstance(m, kind)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def capture(
    model: Model, token_ids: Int[Tensor, "batch token"], lengths: tuple[int, ...], keep: Tensor | None
) -> tuple[Capture, Float[Tensor, "batch kept vocab"]]:
    """Run the model once on right-padded prompts. ``keep``: positions whose output logits are wanted (None: all)."""
    batch, length = token_ids.shape
    seen = Capture(model, batch, length)
    mask = None
    if len(set(lengths)) > 1:
        positions = torch.arange(length, device=token_ids.device)
        mask = (positions < torch.tensor(lengths, device=token_ids.device)[:, None]).long()
    with seen.running():
        output: Any = model.hf(
            input_ids=token_ids,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        )
    return seen, output.logits
