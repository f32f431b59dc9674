"""What headtrace needs to know of an architecture: where its parts are, and nothing else.

An architecture file makes one ``Architecture`` of module paths and small facts. Everything that is
computed (folding, recording, interventions) is the same code for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the tables themselves are read without torch, by `headtrace models`
    from jaxtyping import Bool, Float, Int
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

    Without a gate it is ``act(x W_in + b_in) W_out + b_out``. A mixture of experts has the hidden units of all its
    experts, and ``route``: what each unit is multiplied by because of the router (zero in experts not chosen).
    """

    W_in: Float[Tensor, "d_model d_hidden"]
    W_out: Float[Tensor, "d_hidden d_model"]
    activation: Callable[[Tensor], Tensor]
    b_in: Float[Tensor, " d_hidden"] | None = None
    b_out: Float[Tensor, " d_model"] | None = None
    W_gate: Float[Tensor, "d_model d_hidden"] | None = None
    b_gate: Float[Tensor, " d_hidden"] | None = None
    route: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class OwnAttention:
    """How to reach attention in modules that do not ask transformers' ``AttentionInterface`` for it."""

    method: str | None = None
    """The module's method that attends, called with queries, keys, values and mask; None where the module calls
    PyTorch's ``scaled_dot_product_attention``."""
    scale: float | None = None
    """What q . k is multiplied by; None for d_head ** -0.5."""
    window: Callable[[nn.Module], Bool[Tensor, "1 1 dest src"]] | None = None
    """Which keys each position sees, where that is not all in the mask that the method is given."""


@dataclass(frozen=True)
class Architecture:
    """One family of causal language models, as facts."""

    name: str
    """What people call it."""
    model_type: str
    """``config.model_type`` in transformers."""
    layers: str
    """Path of the list of blocks, from the model."""
    final_norm: str | None
    """Path of the norm before the unembedding, from the model; None where the unembedding reads the residual itself.
    Here and below, a path to an ``nn.Identity`` is as good as None."""
    attention: str
    """Path of the attention module, from a block."""
    mlp: str
    """Path, from a block, of the module that the MLP begins with: what it is called with is the MLP's input."""
    mlp_write: str
    """Path, from a block, of the module whose output is added to the residual as the MLP's write."""
    projections: Callable[[nn.Module, int], Projections]
    """Splits the attention module (second argument: d_head) into heads."""
    mlp_parts: Callable[[nn.Module], MLPParts] | None = None
    """Splits a block's MLP into its matrices; None where it has another shape."""
    experts: bool = False
    """Whether MLPs are mixtures of experts, in some blocks at least."""
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
    """LayerNorm (centres, may have a bias) or RMSNorm; either may have no gain."""
    gain_offset: float = 0.0
    """Added to the stored gain of every norm (Gemma stores gain - 1)."""
    rotary: bool = True
    """Rotary positions (their cosines and sines come from the model's own module) or learned ones."""
    position_embedding: str | None = None
    """Path, from the model, of the module whose output is added to the token embeddings because of their positions;
    None where there is none, or where a norm or a projection comes between it and the first block: then the embedding
    is one component, and not two."""
    rotary_pairs: Literal["half-split", "interleaved"] = "half-split"
    """Which dimensions rotate together: i and i + half (Llama), or 2i and 2i + 1 (GLM, GPT-J, Cohere)."""
    rotary_layers: tuple[bool, ...] | None = None
    """Layer by layer, whether queries and keys are rotated at all (SmolLM3: not in every fourth); None: all layers."""
    rotary_tables: Literal["half-split", "interleaved"] = "half-split"
    """How the model's cosines and sines are laid out: all angles twice over, or each angle twice in a row."""
    rotary_backwards: bool = False
    """Whether queries and keys are rotated the other way: by minus the angle (nanochat)."""
    rotary_in_float32: bool = False
    """Whether they are rotated in float32 whatever the model's dtype, so that float64 is no more exact (Cohere)."""
    own_rotary: Callable[[nn.Module, Int[Tensor, "#batch token"]], tuple[Tensor, Tensor]] | None = None
    """Cosines and sines at some positions, from an attention module that makes them itself (GPT-J)."""
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
    own_attention: OwnAttention | None = None
    """Where attention happens if not through ``AttentionInterface`` (GPT-J, GPT-Neo, Falcon)."""
    blocks_return_tuples: bool = False
    """Whether a block returns its residual as the first of several things."""
    head_sizes: tuple[int, ...] | None = None
    """Layer by layer, how many dimensions a head has, where layers differ; None: what the config says, for all."""
    n_kv_heads: int | None = None
    """Keys per layer as attention sees them, where the config does not say it as ``num_key_value_heads``."""
    write_multiplier: float = 1.0
    """What attention and MLP write is multiplied by this before it is added to the residual (Granite)."""
    logit_multiplier: float = 1.0
    """What the unembedding gives is multiplied by this (Granite, Cohere)."""
    variant: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Facts that the config decides, by the names of the fields here."""
    refuse: Callable[[Any], str | None] = lambda config: None
    """A reason why this variant cannot be decomposed exactly, or None."""

    def of(self, config: Any) -> Architecture:
        """The facts of one model, completed from its config."""
        return replace(self, **self.variant(config))

    def rotates(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated by position."""
        return self.rotary and (self.rotary_layers is None or self.rotary_layers[layer])

    def centred(self, x: Tensor, dim: int = -1) -> Tensor:
        """What the model's norms see of a residual: LayerNorm takes the mean away, RMSNorm nothing."""
        return x - x.mean(dim=dim, keepdim=True) if self.norm == "layer" else x

    def centred_at_the_end(self, x: Tensor) -> Tensor:
        """What the final norm sees of a residual; all of it where there is none."""
        return x if self.final_norm is None else self.centred(x)

    def head_order(self, config: Any, d_head: int) -> Int[Tensor, " d_head"] | None:
        """The order of a head's dimensions in which rotary pairs are half-split; None where they are already.

        A permutation of queries and keys alike changes no score, so every model is seen half-split.
        """
        if not self.rotary or self.rotary_pairs == "half-split":
            return None
        import torch

        width = rotary_width(config, d_head)
        pairs = torch.arange(width).reshape(-1, 2).T.flatten()
        return torch.cat((pairs, torch.arange(width, d_head)))


def rotary_width(config: Any, d_head: int) -> int:
    """How many of a head's dimensions are rotated by position."""
    if getattr(config, "rotary_dim", None):
        return config.rotary_dim
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(d_head * factor)


def split_columns(weight: Tensor, n_heads: int) -> Float[Tensor, "head d_model d_head"]:
    """(d_model, heads * d_head) -> one matrix per head."""
    return weight.reshape(weight.shape[0], n_heads, -1).permute(1, 0, 2)


def separate_linears(output: str = "o_proj") -> Callable[[nn.Module, int], Projections]:
    """``q_proj``, ``k_proj``, ``v_proj`` and an output projection, each an ``nn.Linear``."""

    def read(attention: nn.Module, d_head: int) -> Projections:
        W_O, b_O = _output_heads(attention, output, d_head)
        reads = [_linear(attention.get_submodule(name)) for name in ("q_proj", "k_proj", "v_proj")]
        (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = (_heads(weight, bias, d_head) for weight, bias in reads)
        return Projections(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O)

    return read


def fused_linear(
    fused: str, output: str, layout: Literal["blocks", "groups"] = "blocks"
) -> Callable[[nn.Module, int], Projections]:
    """One projection for queries, keys and values, and an output projection.

    ``blocks``: all queries, then all keys, then all values (GPT-2, Phi-3). ``groups``: for each key-value head its
    queries, its key and its value (GPT-NeoX, and Falcon, whose single key-value head comes behind all queries).
    """

    def read(attention: nn.Module, d_head: int) -> Projections:
        W_O, b_O = _output_heads(attention, output, d_head)
        W, b = _heads(*_linear(attention.get_submodule(fused)), d_head)
        import torch

        n_heads, n_kv = W_O.shape[0], (W.shape[0] - W_O.shape[0]) // 2
        rows = torch.arange(W.shape[0], device=W.device)
        if layout == "blocks":
            queries, keys, values = rows.split([n_heads, n_kv, n_kv])
        else:
            of_kv_head = rows.reshape(n_kv, -1)
            queries, keys, values = of_kv_head[:, :-2].flatten(), of_kv_head[:, -2], of_kv_head[:, -1]
        b_Q, b_K, b_V = (None if b is None else b[part] for part in (queries, keys, values))
        return Projections(W[queries], W[keys], W[values], W_O, b_Q, b_K, b_V, b_O)

    return read


def _heads(weight: Tensor, bias: Tensor | None, d_head: int) -> tuple[Tensor, Tensor | None]:
    n_heads = weight.shape[1] // d_head
    return split_columns(weight, n_heads), None if bias is None else bias.reshape(n_heads, d_head)


def _output_heads(attention: nn.Module, name: str, d_head: int) -> tuple[Tensor, Tensor | None]:
    weight, bias = _linear(attention.get_submodule(name))
    return weight.reshape(-1, d_head, weight.shape[1]), bias


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


def fused_gated_mlp(
    fused: str = "mlp.gate_up_proj",
    down: str = "mlp.down_proj",
    activation: str = "mlp.activation_fn",
) -> Callable[[nn.Module], MLPParts]:
    """A gate and an up projection in one, the gate first, and a down projection, by their paths from a block."""

    def read(block: nn.Module) -> MLPParts:
        (W, b), (W_out, b_out) = (_linear(block.get_submodule(path)) for path in (fused, down))
        W_gate, W_in = W.chunk(2, dim=1)
        b_gate, b_in = (None, None) if b is None else b.chunk(2)
        return MLPParts(W_in, W_out, block.get_submodule(activation), b_in, b_out, W_gate, b_gate)

    return read


def expert_mlp(mixture: str = "mlp", router: str = "gate") -> Callable[[nn.Module], MLPParts]:
    """A mixture of gated experts, with a shared one beside them or not; some blocks may have a single MLP instead."""

    def read(block: nn.Module) -> MLPParts:
        mlp = block.get_submodule(mixture)
        if not hasattr(mlp, "experts"):
            return gated_mlp()(block)
        choose, experts = mlp.get_submodule(router), mlp.get_submodule("experts")
        gate_up: Tensor = experts.gate_up_proj  # type: ignore[assignment]
        down: Tensor = experts.down_proj  # type: ignore[assignment]
        W_gate, W_in = (part.permute(2, 0, 1).flatten(1) for part in gate_up.chunk(2, dim=1))
        W_out = down.permute(0, 2, 1).flatten(0, 1)
        width = down.shape[-1]

        def route(x: Tensor) -> Tensor:
            _, weights, chosen = choose(x.reshape(-1, x.shape[-1]).to(down.dtype))
            every = x.new_zeros(len(weights), len(down)).scatter_(1, chosen, weights.to(x.dtype))
            return every.repeat_interleave(width, dim=1).reshape(*x.shape[:-1], -1)

        parts = MLPParts(W_in, W_out, experts.get_submodule("act_fn"), W_gate=W_gate, route=route)
        return _with_shared_expert(parts, mlp, route) if hasattr(mlp, "shared_expert") else parts

    return read


def _with_shared_expert(parts: MLPParts, mlp: nn.Module, route: Callable[[Tensor], Tensor]) -> MLPParts:
    """An expert that every token passes, behind a gate of its own (Qwen2-MoE): hidden units beside the others."""
    import torch

    own = gated_mlp(*(f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")))(
        mlp
    )
    assert parts.W_gate is not None
    assert own.W_gate is not None
    gate = mlp.get_submodule("shared_expert_gate")

    def both(x: Tensor) -> Tensor:
        share = gate(x.to(parts.W_in.dtype)).sigmoid().to(x.dtype)
        return torch.cat((route(x), share.expand(*x.shape[:-1], own.W_in.shape[1])), dim=-1)

    return replace(
        parts,
        W_in=torch.cat((parts.W_in, own.W_in), dim=1),
        W_out=torch.cat((parts.W_out, own.W_out)),
        W_gate=torch.cat((parts.W_gate, own.W_gate), dim=1),
        route=both,
    )


def plain_mlp(into: str, out: str, activation: str) -> Callable[[nn.Module], MLPParts]:
    """Two projections with an activation between them, by their paths from a block."""

    def read(block: nn.Module) -> MLPParts:
        (W_in, b_in), (W_out, b_out) = (_linear(block.get_submodule(path)) for path in (into, out))
        return MLPParts(W_in, W_out, block.get_submodule(activation), b_in, b_out)

    return read


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight as (in, out), and bias, of an ``nn.Linear`` or of GPT-2's transposed kind."""
    from torch import nn

    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return weight.T if isinstance(module, nn.Linear) else weight, bias
