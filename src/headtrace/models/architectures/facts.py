"""What headtrace needs to know of an architecture: where its parts are, and nothing else.

An architecture file makes one ``Architecture`` of module paths and small facts. Everything that is
computed (folding, recording, interventions) is the same code for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Projections:
    """The projections of one attention module, split into heads; row vectors: ``q = x @ W_Q[h] + b_Q[h]``."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    b_O: Float[Tensor, " d_model"] | None


@dataclass(frozen=True)
class MLPParts:
    """One MLP; row vectors: ``(act(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out``.

    Without a gate it is ``act(x W_in + b_in) W_out + b_out``.
    """

    W_in: Float[Tensor, "d_model d_hidden"]
    W_out: Float[Tensor, "d_hidden d_model"]
    activation: Callable[[Tensor], Tensor]
    b_in: Float[Tensor, " d_hidden"] | None = None
    b_out: Float[Tensor, " d_model"] | None = None
    W_gate: Float[Tensor, "d_model d_hidden"] | None = None
    b_gate: Float[Tensor, " d_hidden"] | None = None


@dataclass(frozen=True)
class Architecture:
    """One family of causal language models, as facts."""

    name: str
    """What people call it."""
    model_type: str
    """``config.model_type`` in transformers."""
    layers: str
    """Path of the list of blocks, from the model."""
    final_norm: str
    """Path of the norm before the unembedding, from the model."""
    attention: str
    """Path of the attention module, from a block."""
    mlp: str
    """Path, from a block, of the module that the MLP begins with: what it is called with is the MLP's input."""
    mlp_write: str
    """Path, from a block, of the module whose output is added to the residual as the MLP's write."""
    projections: Callable[[nn.Module, int], Projections]
    """Splits the attention module (second argument: d_head) into heads."""
    mlp_parts: Callable[[nn.Module], MLPParts] | None = None
    """Splits a block's MLP into its matrices; None where it has another shape (a mixture of experts)."""
    parallel: Callable[[Any], bool] = lambda config: False
    """Whether, by the config, the MLP reads what attention reads, and not what attention has written."""
    attention_norm: str | None = None
    """Path, from a block, of the norm before attention; None where attention reads the residual itself."""
    attention_post_norm: str | None = None
    """Path, from a block, of a norm applied to what attention writes."""
    mlp_norm: str | None = None
    """Path, from a block, of the norm before the MLP; None where the MLP reads the residual itself."""
    mlp_post_norm: str | None = None
    """Path, from a block, of a norm applied to what the MLP writes."""
    norm: Literal["layer", "rms"] = "rms"
    """LayerNorm (centres, has a bias) or RMSNorm."""
    gain_offset: float = 0.0
    """Added to the stored gain of every norm (Gemma stores gain - 1)."""
    rotary: bool = True
    """Rotary positions (their cosines and sines come from the model's own module) or learned ones."""
    rotary_pairs: Literal["half-split", "interleaved"] = "half-split"
    """Which dimensions turn together: i and i + half (Llama), or 2i and 2i + 1 (GLM, GPT-J, Cohere)."""
    rotary_tables: Literal["half-split", "interleaved"] = "half-split"
    """How the model's cosines and sines are laid out: all angles twice over, or each angle twice in a row."""
    query_key_norm: tuple[str, str] | None = None
    """Paths, from the attention module, of the norms of queries and keys."""
    query_key_norm_kind: Literal["layer", "rms"] = "rms"
    """What those norms are. A LayerNorm must have no bias of its own."""
    query_key_norm_axes: Literal["token head d_head", "head token d_head", "token projection"] = (
        "token head d_head"
    )
    """The axes, after the batch, of what those norms see."""
    query_prescaled: bool = False
    """True where the model multiplies queries by d_head ** -0.5 itself and calls attention with scale 1."""
    refuse: Callable[[Any], str | None] = lambda config: None
    """A reason why this variant cannot be decomposed exactly, or None."""

    def centred(self, x: Tensor, dim: int = -1) -> Tensor:
        """What the model's norms see of a residual: LayerNorm takes the mean away, RMSNorm nothing."""
        return x - x.mean(dim=dim, keepdim=True) if self.norm == "layer" else x

    def head_order(self, config: Any, d_head: int) -> Int[Tensor, " d_head"] | None:
        """The order of a head's dimensions in which rotary pairs are half-split; None where they are already.

        A permutation of queries and keys alike changes no score, so every model is seen half-split.
        """
        if not self.rotary or self.rotary_pairs == "half-split":
            return None
        width = rotary_width(config, d_head)
        pairs = torch.arange(width).reshape(-1, 2).T.flatten()
        return torch.cat((pairs, torch.arange(width, d_head)))


def rotary_width(config: Any, d_head: int) -> int:
    """How many of a head's dimensions turn with the position."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(d_head * factor)


def split_columns(weight: Tensor, n_heads: int) -> Float[Tensor, "head d_model d_head"]:
    """(d_model, heads * d_head) -> one matrix per head."""
    return weight.reshape(weight.shape[0], n_heads, -1).permute(1, 0, 2)


def separate_linears(output: str = "o_proj") -> Callable[[nn.Module, int], Projections]:
    """``q_proj``, ``k_proj``, ``v_proj`` and an output projection, each an ``nn.Linear``."""

    def read(attention: nn.Module, d_head: int) -> Projections:
        def heads(name: str) -> tuple[Tensor, Tensor | None]:
            linear = attention.get_submodule(name)
            weight: Tensor = linear.weight.T  # type: ignore[assignment]
            n_heads = weight.shape[1] // d_head
            bias: Tensor | None = linear.bias  # type: ignore[assignment]
            return split_columns(weight, n_heads), None if bias is None else bias.reshape(n_heads, d_head)

        (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = heads("q_proj"), heads("k_proj"), heads("v_proj")
        out = attention.get_submodule(output)
        weight_out: Tensor = out.weight.T  # type: ignore[assignment]
        W_O = weight_out.reshape(W_Q.shape[0], d_head, -1)
        return Projections(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, out.bias)  # type: ignore[arg-type]

    return read


def gated_mlp(
    gate: str = "mlp.gate_proj",
    up: str = "mlp.up_proj",
    down: str = "mlp.down_proj",
    activation: str = "mlp.act_fn",
) -> Callable[[nn.Module], MLPParts]:
    """A gate, an up and a down projection, by their paths from a block."""

    def read(block: nn.Module) -> MLPParts:
        (W_gate, b_gate), (W_in, b_in), (W_out, b_out) = (
            _linear(block.get_submodule(p)) for p in (gate, up, down)
        )
        act = block.get_submodule(activation)
        return MLPParts(W_in, W_out, act, b_in, b_out, W_gate, b_gate)

    return read


def plain_mlp(into: str, out: str, activation: str) -> Callable[[nn.Module], MLPParts]:
    """Two projections with an activation between them, by their paths from a block."""

    def read(block: nn.Module) -> MLPParts:
        (W_in, b_in), (W_out, b_out) = (_linear(block.get_submodule(path)) for path in (into, out))
        return MLPParts(W_in, W_out, block.get_submodule(activation), b_in, b_out)

    return read


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight as (in, out), and bias, of an ``nn.Linear`` or of GPT-2's transposed kind."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return weight.T if isinstance(module, nn.Linear) else weight, bias
