"""Transformers written by hand: features, what heads and MLPs read and write, and the weights that do just that.

A blueprint speaks of *features*, one number each: "the token is 3", "the token before is 3", "repeated". Each gets its
own direction of the residual stream, at right angles to all others and to the vector of ones, so that a layer norm's
centring changes nothing. One feature more, the `ballast`, is large and the same everywhere: whatever else is written,
the norm's scale stays what it is (to less than 1%), and its gain undoes it. Reading a feature is then one product
with one direction. Directions and the basis inside each head are random: nothing lies along an axis.

Heads and MLPs that the circuit does not need are *idle*: they read everything at random, and write only into features
called `junk`, which no working part reads. There is much to find in such a model, and only a known part of it matters.

>>> features = Features(token=3, next=2)
>>> features["next"].shape                                   # one row per feature, one column per feature of all
torch.Size([2, 9])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BALLAST = 100.0
"""Every token's part that is always the same; all other features together have a length of about 3."""
JUNK = 3
SHARPNESS = 40.0
"""Attention logit of a match, over 0 without one: attention beside it is e^-40."""
UNLIKE = 0.3
"""Gains of a head's dimensions differ by this share from first to last, so that its channels are told apart."""
SATURATED = 20.0
"""A hidden unit of an MLP that is on reads this; gelu and silu are then the identity to 1e-7, and 0 at 0."""
ANSWER = 12.0
"""Output logit of the answer, over 0 for all others."""
IDLE_WIDTH = 3
"""Dimensions of an idle head, or hidden units of an idle MLP."""
IDLE_VOICE = 0.2
"""How loudly idle parts repeat what they read: softly enough that junk does not grow from layer to layer."""

Rows = Float[Tensor, "n feature"]


class Features:
    """Named groups of features, numbered through. ``features["token"]`` has one row per feature of the group."""

    def __init__(self, **groups: int) -> None:
        self.slices: dict[str, slice] = {}
        self.count = 0
        for name, size in {**groups, "junk": JUNK, "ballast": 1}.items():
            self.slices[name] = slice(self.count, self.count + size)
            self.count += size

    def __getitem__(self, name: str) -> Rows:
        return torch.eye(self.count, dtype=torch.float64)[self.slices[name]]

    @property
    def constant(self) -> Rows:
        """What reads 1 at every token."""
        return self["ballast"] / BALLAST


@dataclass(frozen=True)
class Head:
    """Row i of `query` is matched with row i of `key`; what row i of `value` reads, row i of `write` writes."""

    query: Rows
    key: Rows
    value: Rows
    write: Rows

    def __post_init__(self) -> None:
        assert self.query.shape == self.key.shape
        assert self.value.shape == self.write.shape

    @property
    def width(self) -> int:
        return max(len(self.query), len(self.value))


@dataclass(frozen=True)
class MLP:
    """Hidden unit i is on if the feature (or sum) that row i of `read` names is, and writes row i of `write`."""

    read: Rows
    write: Rows
    times: Rows | None = None
    """In a gated MLP, what the gates let through; without it, what they read themselves."""


@dataclass(frozen=True)
class Blueprint:
    """A whole model. What is not named is idle."""

    features: Features
    token: Rows
    """What the embedding of each token writes (the ballast is added)."""
    n_layers: int
    heads: Mapping[tuple[int, int], Head]
    unembed: Rows
    """The feature that each token of the vocabulary is read from."""
    position: Rows | None = None
    mlps: Mapping[int, MLP] = field(default_factory=dict)
    n_heads: int = 3
    idle: bool = True
    """Whether there is anything besides the circuit."""
    seed: int = 0

    def directions(
        self, d_model: int, random: torch.Generator | None = None
    ) -> Float[Tensor, "feature d_model"]:
        """Each feature's direction; they are the first thing that is drawn for a model."""
        random = torch.Generator().manual_seed(self.seed) if random is None else random
        start = torch.randn(d_model, d_model, generator=random, dtype=torch.float64)
        start[:, 0] = 1  # the first is then the vector of ones, and all others are at right angles to it
        return torch.linalg.qr(start).Q.T[1 : self.features.count + 1]


@dataclass
class Weights:
    """A blueprint as matrices for a residual of d_model dimensions; (in, out) throughout."""

    blueprint: Blueprint
    d_model: int
    d_head: int
    usable: slice
    """The dimensions of a head that may be used."""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.blueprint.seed)
        self.directions = self.blueprint.directions(self.d_model, self.random)
        self.gain = BALLAST / self.d_model**0.5
        self.token = self.blueprint.token.clone()
        self.token += BALLAST * self.blueprint.features["ballast"]

    def reads(self, rows: Rows) -> Float[Tensor, "d_model n"]:
        return self.directions.T @ rows.T

    def writes(self, rows: Rows) -> Float[Tensor, "n d_model"]:
        return rows @ self.directions

    def _idle(self) -> tuple[Rows, Rows]:
        """Reading everything but the ballast at random, writing junk at random."""
        features = self.blueprint.features
        read = torch.randn(IDLE_WIDTH, features.count, generator=self.random, dtype=torch.float64)
        write = IDLE_VOICE * torch.randn(IDLE_WIDTH, JUNK, generator=self.random, dtype=torch.float64)
        write = write * self.blueprint.idle
        return read - read @ features["ballast"].T @ features["ballast"], write @ features["junk"]

    def _head(self, layer: int, head: int) -> Head:
        """The head with its sharpness; idle ones attend as sharply as their random logits say."""
        found = self.blueprint.heads.get((layer, head))
        if found is None:
            return Head(self._idle()[0], self._idle()[0], *self._idle())
        gains = SHARPNESS * torch.linspace(1, 1 + UNLIKE, len(found.query), dtype=torch.float64)
        return Head(gains[:, None] * found.query, found.key, found.value, found.write)

    def attention(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V as (d_model, heads * d_head) and W_O as (heads * d_head, d_model)."""
        parts: list[tuple[Tensor, ...]] = []
        for number in range(self.blueprint.n_heads):
            head = self._head(layer, number)
            inside = torch.zeros(self.usable.stop - self.usable.start, self.d_head, dtype=torch.float64)
            basis = torch.randn(len(inside), len(inside), generator=self.random, dtype=torch.float64)
            inside[:, self.usable] = torch.linalg.qr(basis).Q
            match, move = inside[: len(head.query)], inside[: len(head.value)]
            W_Q = self.reads(head.query) @ match * self.d_head**0.5
            W_K, W_V = self.reads(head.key) @ match, self.reads(head.value) @ move
            parts.append((W_Q, W_K, W_V, move.T @ self.writes(head.write)))
        Q, K, V, O = zip(*parts, strict=True)
        return torch.cat(Q, 1), torch.cat(K, 1), torch.cat(V, 1), torch.cat(O, 0)

    def through_gates(
        self, layer: int, read: Float[Tensor, "d_model hidden"]
    ) -> Float[Tensor, "d_model hidden"]:
        """What the gates of an MLP let through, given what they read."""
        found, through = self.blueprint.mlps.get(layer), read.clone()
        if found is not None and found.times is not None:
            through[:, : len(found.read)] = self.reads(found.times)
        return through

    def mlp(
        self, layer: int, hidden: int
    ) -> tuple[Float[Tensor, "d_model hidden"], Float[Tensor, "hidden d"]]:
        """What hidden units read and write; the idle ones come after those of the blueprint."""
        found = self.blueprint.mlps.get(layer)
        read, write = self._idle()
        read = IDLE_VOICE * read
        if found is not None:
            read, write = torch.cat((found.read, read)), torch.cat((found.write, write))
        spare = torch.zeros(hidden - len(read), read.shape[1], dtype=torch.float64)
        return self.reads(torch.cat((read, spare))), self.writes(torch.cat((write, spare)))


def _sizes(blueprint: Blueprint) -> tuple[int, int]:
    """The least width of a head, and of an MLP."""
    width = max([IDLE_WIDTH, *(head.width for head in blueprint.heads.values())])
    hidden = IDLE_WIDTH + max([0, *(len(mlp.read) for mlp in blueprint.mlps.values())])
    return width, hidden


def _copy(weights: Mapping[Tensor, Tensor]) -> None:
    for parameter, value in weights.items():
        parameter.copy_(value)


@torch.no_grad()
def as_gpt2(blueprint: Blueprint) -> GPT2LMHeadModel:
    """Layer norms with centring, learned positions, gelu; all biases are zero."""
    assert blueprint.position is not None
    width, hidden = _sizes(blueprint)
    n_heads = blueprint.n_heads
    d_head = max(width, -(-(blueprint.features.count + 1) // n_heads))
    w = Weights(blueprint, n_heads * d_head, d_head, slice(0, d_head))
    config = GPT2Config(
        vocab_size=len(blueprint.token),
        n_positions=len(blueprint.position),
        n_embd=w.d_model,
        n_layer=blueprint.n_layers,
        n_head=n_heads,
        n_inner=hidden,
        tie_word_embeddings=False,
        **_common(),
    )
    hf: Any = GPT2LMHeadModel._from_config(config, attn_implementation="eager").double().eval()
    _zero(hf)
    copies = {hf.transformer.wte.weight: w.writes(w.token), hf.lm_head.weight: w.writes(blueprint.unembed)}
    copies |= {hf.transformer.wpe.weight: w.writes(blueprint.position)}
    for number, layer in enumerate(hf.transformer.h):
        *qkv, out = w.attention(number)
        read, write = w.mlp(number, hidden)
        copies |= {layer.attn.c_attn.weight: torch.cat(qkv, dim=1), layer.attn.c_proj.weight: out}
        copies |= {layer.mlp.c_fc.weight: SATURATED * read, layer.mlp.c_proj.weight: write / SATURATED}
    _copy(copies)
    _set_gains(hf, w.gain, ("ln_1", "ln_2", "ln_f"))
    return hf


@torch.no_grad()
def as_llama(blueprint: Blueprint) -> LlamaForCausalLM:
    """RMS norms, a gated MLP, grouped queries with a group of one, and rotary positions that turn nothing.

    Rotary positions turn dimension i of each half of a head by ``theta ** (-i / half)`` per token: with a theta of
    1e30 that is less than 1e-14 in the second quarter of a head, which alone is used.
    """
    width, hidden = _sizes(blueprint)
    w = Weights(blueprint, blueprint.features.count + 1, 4 * width, slice(width, 2 * width))
    config = LlamaConfig(
        vocab_size=len(blueprint.token),
        max_position_embeddings=64,
        hidden_size=w.d_model,
        num_hidden_layers=blueprint.n_layers,
        num_attention_heads=blueprint.n_heads,
        num_key_value_heads=blueprint.n_heads,
        head_dim=w.d_head,
        intermediate_size=hidden,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},
        tie_word_embeddings=False,
        **_common(),
    )
    hf: Any = LlamaForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    _zero(hf)
    copies = {hf.model.embed_tokens.weight: w.writes(w.token), hf.lm_head.weight: w.writes(blueprint.unembed)}
    for number, layer in enumerate(hf.model.layers):
        Q, K, V, out = w.attention(number)
        read, write = w.mlp(number, hidden)
        attention, mlp = layer.self_attn, layer.mlp
        copies |= {attention.q_proj.weight: Q.T, attention.k_proj.weight: K.T, attention.v_proj.weight: V.T}
        copies |= {attention.o_proj.weight: out.T, mlp.gate_proj.weight: SATURATED * read.T}
        copies |= {
            mlp.up_proj.weight: w.through_gates(number, read).T,
            mlp.down_proj.weight: write.T / SATURATED,
        }
    _copy(copies)
    _set_gains(hf, w.gain, ("norm", "layernorm"))
    return hf


def _common() -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _zero(hf: Any) -> None:
    for parameter in hf.parameters():
        parameter.zero_()


def _set_gains(hf: Any, gain: float, names: tuple[str, ...]) -> None:
    for name, parameter in hf.named_parameters():
        *_, module, kind = name.split(".")
        if kind == "weight" and module.endswith(names):
            parameter.fill_(gain)
