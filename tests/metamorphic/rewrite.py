"""Rewrites of a tiny model that leave what it computes as it is, each with what it renames.

A rewrite takes a Hugging Face module with float64 weights, changes it in place (or gives another one), and returns the
module and a `Renaming`: where heads, layers and tokens are afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.tiny import tiny_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi", "opt", "starcoder2")
RMS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose norms have a gain alone and whose writes go to the residual as they are: it may be rotated."""


@dataclass(frozen=True)
class Renaming:
    """Where things are after a rewrite: a head (layer, head), a layer, a token id."""

    heads: dict[tuple[int, int], int] = field(default_factory=dict)
    layers: int = 0
    tokens: Tensor | None = None

    def ids(self, ids: list[int]) -> list[int]:
        return ids if self.tokens is None else self.tokens[ids].tolist()


class Parts:
    """The weights of a tiny model by what they do: every projection is a linear map of rows."""

    def __init__(self, hf: Any) -> None:
        self.hf, self.config = hf, hf.config
        stack = hf.model.decoder if hasattr(hf.model, "decoder") else hf.model
        self.layers, self.stack = list(stack.layers), stack
        self.n_heads: int = self.config.num_attention_heads
        self.n_kv: int = getattr(self.config, "num_key_value_heads", None) or self.n_heads
        self.final = next(
            getattr(stack, name)
            for name in ("norm", "final_layernorm", "final_layer_norm")
            if hasattr(stack, name)
        )

    def attention(self, layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        block = layer.self_attn
        out = next(getattr(block, name) for name in ("o_proj", "dense", "out_proj") if hasattr(block, name))
        return block.q_proj, block.k_proj, block.v_proj, out

    def mlp(self, layer: Any) -> tuple[list[nn.Linear], nn.Linear]:
        """The maps into the neurons, and the one out of them."""
        block = layer if hasattr(layer, "fc1") else layer.mlp
        names = ("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj")
        *into, out = next(found for found in names if hasattr(block, found[0]))
        return [getattr(block, name) for name in into], getattr(block, out)

    def norms(self, layer: Any) -> Iterator[nn.Module]:
        for name, module in layer.named_children():
            if "norm" in name:
                yield module

    def read_by(self, layer: Any) -> list[tuple[nn.Module, list[nn.Linear]]]:
        """Each norm before a block, with the maps that read it."""
        readers, into = list(self.attention(layer)[:3]), self.mlp(layer)[0]
        names = [name for name, _ in layer.named_children() if "norm" in name]
        if len(names) == 1:  # attention and MLP in parallel
            return [(getattr(layer, names[0]), readers + into)]
        before = "pre_feedforward_layernorm" if "pre_feedforward_layernorm" in names else names[1]
        return [(getattr(layer, names[0]), readers), (getattr(layer, before), into)]

    def of_heads(self, linear: nn.Linear, heads: int) -> list[Tensor]:
        """Weight and bias with an axis of heads in front, as views."""
        found = [linear.weight.unflatten(0, (heads, -1))]
        return found if linear.bias is None else [*found, linear.bias.unflatten(0, (heads, -1))]


Rewrite = Callable[[Any, torch.Generator], tuple[Any, Renaming]]


def random_maps(n: int, size: int, generator: torch.Generator) -> Tensor:
    """Well-conditioned invertible matrices."""
    noise = torch.randn(n, size, size, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(noise)[0] * (
        0.5 + torch.rand(n, 1, size, generator=generator, dtype=torch.float64)
    )


def values_in_another_basis(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """GL of OV: values ``v A``, and ``A^-1`` before the output."""
    parts = Parts(hf)
    for layer in parts.layers:
        *_, value, out = parts.attention(layer)
        views = parts.of_heads(value, parts.n_kv)
        maps = random_maps(parts.n_kv, views[0].shape[1], generator)
        views[0].copy_(maps.mT @ views[0])
        if len(views) > 1:
            views[1].copy_((views[1][:, None] @ maps)[:, 0])
        back = torch.linalg.inv(maps).repeat_interleave(parts.n_heads // parts.n_kv, dim=0)
        weight = out.weight.unflatten(1, (parts.n_heads, -1))
        weight.copy_(torch.einsum("dhr,hsr->dhs", weight, back))
    return hf, Renaming()


def queries_and_keys_in_another_basis(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """GL of QK: any map without rotary positions; with them, a turn and a scale of each pair of dimensions."""
    parts = Parts(hf)
    rotary = hasattr(parts.stack, "rotary_emb")
    for layer in parts.layers:
        query, key, *_ = parts.attention(layer)
        views = parts.of_heads(query, parts.n_heads), parts.of_heads(key, parts.n_kv)
        size = views[0][0].shape[1]
        maps = random_maps(parts.n_kv, size, generator)
        if rotary:
            width = 2 * parts.stack.rotary_emb.inv_freq.numel()
            maps = torch.eye(size, dtype=torch.float64).repeat(parts.n_kv, 1, 1)
            angle, scale = (
                torch.rand(2, parts.n_kv, width // 2, generator=generator, dtype=torch.float64) + 0.5
            )
            first, second = torch.arange(width // 2), torch.arange(width // 2, width)
            maps[:, first, first] = maps[:, second, second] = scale * angle.cos()
            maps[:, first, second], maps[:, second, first] = scale * angle.sin(), -scale * angle.sin()
        inverse = torch.linalg.inv(maps).mT.contiguous()
        for heads, by in zip(
            views, (maps.repeat_interleave(parts.n_heads // parts.n_kv, dim=0), inverse), strict=True
        ):
            heads[0].copy_(by.mT @ heads[0])
            if len(heads) > 1:
                heads[1].copy_((heads[1][:, None] @ by)[:, 0])
    return hf, Renaming()


def heads_in_another_order(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    parts, heads = Parts(hf), dict[tuple[int, int], int]()
    group = parts.n_heads // parts.n_kv
    for index, layer in enumerate(parts.layers):
        query, key, value, out = parts.attention(layer)
        order = torch.randperm(parts.n_kv, generator=generator)
        of_queries = torch.cat(
            [group * kv + torch.randperm(group, generator=generator) for kv in order.tolist()]
        )
        for linear, n, by in (
            (query, parts.n_heads, of_queries),
            (key, parts.n_kv, order),
            (value, parts.n_kv, order),
        ):
            for view in parts.of_heads(linear, n):
                view.copy_(view[by].clone())
        weight = out.weight.unflatten(1, (parts.n_heads, -1))
        weight.copy_(weight[:, of_queries].clone())
        heads |= {(index, old): new for new, old in enumerate(of_queries.tolist())}
    return hf, Renaming(heads)


def neurons_in_another_order(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    parts = Parts(hf)
    for layer in parts.layers:
        into, out = parts.mlp(layer)
        order = torch.randperm(out.weight.shape[1], generator=generator)
        for linear in into:
            linear.weight.copy_(linear.weight[order].clone())
            if linear.bias is not None:
                linear.bias.copy_(linear.bias[order].clone())
        out.weight.copy_(out.weight[:, order].clone())
    return hf, Renaming()


def _residual(hf: Any, change: Callable[[Tensor], Tensor], vectors: bool = True) -> None:
    """Apply a map of the residual stream to everything that reads from or writes to it, along its last axis."""
    parts = Parts(hf)
    embeddings = {id(m.weight): m.weight for m in parts.stack.modules() if isinstance(m, nn.Embedding)}
    embeddings[id(hf.lm_head.weight)] = hf.lm_head.weight
    for weight in embeddings.values():
        weight.copy_(change(weight))
    for layer in parts.layers:
        query, key, value, out = parts.attention(layer)
        into, down = parts.mlp(layer)
        for linear in (query, key, value, *into):
            linear.weight.copy_(change(linear.weight))
        for linear in (out, down):
            linear.weight.copy_(change(linear.weight.mT).mT)
            if linear.bias is not None:
                linear.bias.copy_(change(linear.bias))
    if vectors:
        for norm in (parts.final, *(norm for layer in parts.layers for norm in parts.norms(layer))):
            for parameter in norm.parameters():
                parameter.copy_(change(parameter))


def residual_in_another_order(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    order = torch.randperm(hf.config.hidden_size, generator=generator)
    _residual(hf, lambda x: x[..., order].clone())
    return hf, Renaming()


def gains_folded(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """Every gain before a block becomes one, in the columns of what reads it; biases become those of the readers."""
    parts = Parts(hf)
    offset = 1.0 if hf.config.model_type == "gemma2" else 0.0
    for layer in parts.layers:
        for norm, readers in parts.read_by(layer):
            gain = norm.weight + offset
            for linear in readers:
                if getattr(norm, "bias", None) is not None:
                    linear.bias.add_(linear.weight @ norm.bias)
                linear.weight.mul_(gain)
            norm.weight.fill_(1 - offset)
            if getattr(norm, "bias", None) is not None:
                norm.bias.zero_()
    return hf, Renaming()


def residual_rotated(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """Another basis of the residual stream: gains stand in the way of a rotation, so they are folded first."""
    hf, _ = gains_folded(hf, generator)
    final = Parts(hf).final
    hf.lm_head.weight = nn.Parameter(hf.lm_head.weight * final.weight)
    final.weight.fill_(1.0)
    turn = torch.linalg.qr(
        torch.randn(2 * (hf.config.hidden_size,), generator=generator, dtype=torch.float64)
    )[0]
    _residual(hf, lambda x: x @ turn, vectors=False)
    return hf, Renaming()


def residual_scaled(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """Everything that is written three times as large, and the norms' epsilons with it."""
    parts, times = Parts(hf), 3.0
    for module in parts.stack.modules():
        if isinstance(module, nn.Embedding):
            module.weight.mul_(times)
    for layer in parts.layers:
        for linear in (parts.attention(layer)[3], parts.mlp(layer)[1]):
            for parameter in linear.parameters():
                parameter.mul_(times)
    for norm in (parts.final, *(norm for layer in parts.layers for norm in parts.norms(layer))):
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        setattr(norm, name, getattr(norm, name) * times**2)
    return hf, Renaming()


def tokens_in_another_order(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    new = torch.randperm(hf.config.vocab_size, generator=generator)
    weights = {id(w): w for w in (hf.get_input_embeddings().weight, hf.lm_head.weight)}
    for weight in (*weights.values(), *([] if hf.lm_head.bias is None else [hf.lm_head.bias])):
        before = weight.clone()
        weight[new] = before
    return hf, Renaming(tokens=new)


def logits_shifted(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
    """The same vector on every row of the unembedding: all logits of a position move together."""
    row = torch.randn(hf.config.hidden_size, generator=generator, dtype=torch.float64)
    hf.lm_head.weight = nn.Parameter(hf.lm_head.weight + row)
    return hf, Renaming()


def layers_that_write_nothing(front: int) -> Rewrite:
    """Two more layers, in front or behind: whole layers, whose output maps are zero."""

    def rewrite(hf: Any, generator: torch.Generator) -> tuple[Any, Renaming]:
        n, more = hf.config.num_hidden_layers, 2
        options = {"num_hidden_layers": n + more, "tie_word_embeddings": False}
        longer = tiny_hf(hf.config.model_type, seed=3, dtype=torch.float64, **options)
        ours, theirs = Parts(hf), Parts(longer)
        state = {name: p for name, p in hf.state_dict().items() if ".layers." not in name}
        longer.load_state_dict(state, strict=False)
        for index, layer in enumerate(ours.layers):
            theirs.layers[index + (more if front else 0)].load_state_dict(layer.state_dict())
        for layer in theirs.layers[:more] if front else theirs.layers[n:]:
            for linear in (theirs.attention(layer)[3], theirs.mlp(layer)[1]):
                for parameter in linear.parameters():
                    parameter.zero_()
        return longer, Renaming(layers=more if front else 0)

    return rewrite


REWRITES: dict[str, tuple[Rewrite, tuple[str, ...]]] = {
    "values in another basis": (values_in_another_basis, FAMILIES),
    # QK-norm normalises what a change of basis would stretch.
    "queries and keys in another basis": (
        queries_and_keys_in_another_basis,
        tuple(name for name in FAMILIES if name != "qwen3"),
    ),
    "heads permuted": (heads_in_another_order, FAMILIES),
    "neurons permuted": (neurons_in_another_order, FAMILIES),
    "residual permuted": (residual_in_another_order, FAMILIES),
    "residual rotated": (residual_rotated, RMS),
    # Post-norms set the size of what is written, whatever goes in.
    "residual scaled": (residual_scaled, tuple(name for name in FAMILIES if name != "gemma2")),
    "gains folded": (gains_folded, tuple(name for name in FAMILIES if name != "starcoder2")),
    "vocabulary permuted": (tokens_in_another_order, FAMILIES),
    # A softcap on logits bends what is shifted.
    "logits shifted": (logits_shifted, tuple(name for name in FAMILIES if name != "gemma2")),
    "empty layers in front": (layers_that_write_nothing(1), FAMILIES),
    "empty layers behind": (layers_that_write_nothing(0), FAMILIES),
}
