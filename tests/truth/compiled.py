"""Transformers compiled from programs (by tracr, see `make_compiled.py`), and the edges that their weights have.

`CompiledForCausalLM` runs the weights as a Hugging Face model of our own, which headtrace learns of as of any user's
architecture. `true_edges` finds the circuit of a prompt from the weights alone, in numpy and without headtrace: every
component that a node reads is taken away from what it reads, one at a time, from the root down.

- A **query** or **key** edge is true if the attention of the head changes by more than 5% without that component on
  that side (on the key side in all keys, as headtrace defines a component there: it may favour its key or hold down
  others).
- An **input** edge is true if what the MLP does to its own reader changes by more than 5% without the component.
  Where either of two components suffices, neither changes anything alone: an edge that is found is not called false
  if the component matters when one or two others are taken away with it (``together``).
- A **value** or **root** edge is true if it carries anything at all.

`edges_by_reader` asks less of an edge: it must change what its own reader does, whether or not that matters further up.
It has every edge that matters along a path, and those of what an MLP writes besides.

Each model also comes *rotated*: the residual stream, and the spaces inside every head, in random bases. It is the same
function with the same circuit, and nothing lies along an axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headtrace
from headtrace.models import ARCHITECTURES, Architecture, register_architecture
from headtrace.models.architectures.facts import plain_mlp, separate_linears
from headtrace.vocabulary import ROOT, Side, Site
from tests.truth.scoring import Place, embedding, mlp, position

FOLDER = Path(__file__).parent / "compiled"
ABOUT: dict[str, Any] = json.loads((FOLDER / "programs.json").read_text())
NO_NORM = 2.0**50
"""A norm by ``sqrt(mean square + NO_NORM ** 2)`` with a gain of NO_NORM changes no bit: models here have no norms, and
an architecture must name a final one."""
CHANGED = 0.05
NOTHING = 1e-6
"""Heads attend by logits of about 50 or more: what leaks elsewhere is far below this."""

Array = NDArray[np.float64]
Weights = dict[str, Array]
Component = tuple[Any, ...]
"""``("embedding",)``, ``("position",)``, ``("mlp", layer)`` or ``("head", layer, head, source position)``."""


# -- the model -----------------------------------------------------------------------------------------------


class CompiledConfig(PreTrainedConfig):
    model_type = "compiled"

    def __init__(
        self,
        vocab_size: int = 2,
        max_position_embeddings: int = 2,
        hidden_size: int = 2,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        head_dim: int = 2,
        intermediate_size: int = 1,
        **others: Any,
    ) -> None:
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads, self.head_dim = num_attention_heads, head_dim
        self.intermediate_size = intermediate_size
        super().__init__(tie_word_embeddings=False, **others)


class CompiledAttention(nn.Module):
    def __init__(self, config: CompiledConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        shape = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (read(x).view(shape).transpose(1, 2) for read in (self.q_proj, self.k_proj, self.v_proj))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        read, _ = attend(self, q, k, v, attention_mask, scaling=self.config.head_dim**-0.5)
        return self.o_proj(read.reshape(*x.shape[:2], -1))


class CompiledMLP(nn.Module):
    def __init__(self, config: CompiledConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act = nn.ReLU()
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class CompiledBlock(nn.Module):
    def __init__(self, config: CompiledConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention, self.mlp = CompiledAttention(config, layer_idx), CompiledMLP(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = hidden_states + self.attention(hidden_states, attention_mask)
        return x + self.mlp(x)


class CompiledForCausalLM(PreTrainedModel):
    """Learned positions, attention and ReLU MLPs without biases or norms; outputs have a vocabulary of their own."""

    config_class = CompiledConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: CompiledConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(CompiledBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=NO_NORM**2)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> CausalLMOutput:
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        x = x + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask)
        return CausalLMOutput(logits=self.lm_head(self.norm(x)))


COMPILED = Architecture(
    name="Compiled",
    model_type="compiled",
    layers="layers",
    final_norm="norm",
    attention="attention",
    mlp="mlp",
    mlp_write="mlp",
    projections=separate_linears(),
    mlp_parts=plain_mlp("mlp.up", "mlp.down", "mlp.act"),
    rotary=False,
    position_embedding="positions",
)


@cache
def weights(program: str, *, rotated: bool = False) -> Weights:
    """The matrices of a program that the tests keep."""
    w = read_weights(FOLDER / f"{program.replace(' ', '_')}.safetensors")
    return rotated_weights(w) if rotated else w


def read_weights(file: Path) -> Weights:
    """Matrices for row vectors; tokens and outputs are filled up with zeros to equal numbers."""
    w = {name: value.astype(np.float64) for name, value in load_file(file).items()}
    size = max(2, len(w["token"]), len(w["unembed"]))
    for name in ("token", "unembed"):
        w[name] = np.pad(w[name], ((0, size - len(w[name])), (0, 0)))
    return w


def rotated_weights(w: Weights) -> Weights:
    """The same function in random bases of the residual stream, and of queries with keys and of values in each head."""
    random = np.random.default_rng(0)
    layers, heads, d_model, d_head = w["W_Q"].shape
    turn = np.linalg.qr(random.normal(size=(d_model, d_model)))[0]
    match, move = np.linalg.qr(random.normal(size=(2, layers, heads, d_head, d_head)))[0]
    return {
        **{name: w[name] @ turn for name in ("token", "position", "unembed", "W_out")},
        "W_in": turn.T @ w["W_in"],
        "W_Q": turn.T @ w["W_Q"] @ match,
        "W_K": turn.T @ w["W_K"] @ match,
        "W_V": turn.T @ w["W_V"] @ move,
        "W_O": move.swapaxes(-1, -2) @ w["W_O"] @ turn,
    }


@cache
def compiled_model(program: str, *, rotated: bool = False) -> headtrace.Model:
    """A program as a model in float64, loaded through the registry of architectures."""
    return as_model(weights(program, rotated=rotated))


def as_model(w: Weights) -> headtrace.Model:
    """Matrices for row vectors as a model."""
    layers, heads, d_model, d_head = w["W_Q"].shape
    config = CompiledConfig(
        vocab_size=len(w["token"]),
        max_position_embeddings=len(w["position"]),
        hidden_size=d_model,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=d_head,
        intermediate_size=w["W_in"].shape[-1],
    )
    hf = CompiledForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()
    state = {"tokens": w["token"], "positions": w["position"], "lm_head": w["unembed"]}
    state["norm"] = np.full(d_model, NO_NORM)
    for layer in range(layers):
        for name, key in {"q_proj": "W_Q", "k_proj": "W_K", "v_proj": "W_V"}.items():
            state[f"layers.{layer}.attention.{name}"] = w[key][layer].swapaxes(1, 2).reshape(-1, d_model)
        state[f"layers.{layer}.attention.o_proj"] = w["W_O"][layer].reshape(-1, d_model).T
        state[f"layers.{layer}.mlp.up"], state[f"layers.{layer}.mlp.down"] = (
            w["W_in"][layer].T,
            w["W_out"][layer].T,
        )
    hf.load_state_dict({f"{name}.weight": torch.tensor(value) for name, value in state.items()})
    with patch.object(ARCHITECTURES, "_known", dict(ARCHITECTURES)):
        register_architecture(COMPILED)
        return headtrace.load(hf)


# -- the truth -----------------------------------------------------------------------------------------------

Effect = Callable[[Array], float]
"""By which share the reader of a node changes, up or down, if this is taken away from what the node writes. A node has
several where it is read through MLPs: with their gates live, and with their gates as they were."""


class Run:
    """A prompt run through the weights, with what every component wrote."""

    def __init__(self, w: Weights, ids: list[int]) -> None:
        self.w = w
        x = w["token"][ids]
        writes: dict[Component, Array] = {("embedding",): x, ("position",): w["position"][: len(ids)]}
        self.before_attention = list[dict[Component, Array]]()
        self.before_mlp = list[dict[Component, Array]]()
        self.patterns = list[Array]()
        for layer in range(len(w["W_Q"])):
            self.before_attention.append(dict(writes))
            x = sum(writes.values(), np.zeros_like(x))
            patterns = np.stack([self.attend(layer, head, x, x) for head in range(w["W_Q"].shape[1])])
            self.patterns.append(patterns)
            for head, pattern in enumerate(patterns):
                moved = x @ w["W_V"][layer, head] @ w["W_O"][layer, head]
                for src in range(len(ids)):
                    writes["head", layer, head, src] = pattern[:, src, None] * moved[src]
            self.before_mlp.append(dict(writes))
            writes["mlp", layer] = self.mlp(layer, sum(writes.values(), np.zeros_like(x)))
        self.final = writes

    def attend(self, layer: int, head: int, queries: Array, keys: Array) -> Array:
        """The attention pattern of a head that reads these residuals."""
        W_Q, W_K = self.w["W_Q"][layer, head], self.w["W_K"][layer, head]
        logits = (queries @ W_Q) @ (keys @ W_K).T / W_Q.shape[-1] ** 0.5
        logits = np.where(np.tri(len(keys), dtype=bool)[-len(queries) :], logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    def mlp(self, layer: int, x: Array) -> Array:
        return np.maximum(x @ self.w["W_in"][layer], 0) @ self.w["W_out"][layer]


def _site(component: Component, at: int) -> Site:
    match component:
        case ("head", layer, head, src):
            return Site("head", layer, head, at, src)
        case ("mlp", layer):
            return mlp(layer, at)
        case ("position",):
            return position(at)
        case _:
            return embedding(at)


def true_edges(w: Weights, ids: list[int], answer: int, wrong: int, *, together: int = 0) -> set[Place]:
    """All edges of the circuit of a logit difference at the last position; also those into MLPs that are true only if
    up to ``together`` others are taken away as well."""
    run, last = Run(w, ids), len(ids) - 1
    direction = w["unembed"][answer] - w["unembed"][wrong]
    total = sum(float(write[last] @ direction) for write in run.final.values())
    edges = set[Place]()

    def to_root(change: Array) -> float:
        return float(change @ direction / total)

    for component, write in run.final.items():
        if abs(to_root(write[last])) > NOTHING:
            edges.add((_site(component, last), ROOT, "root"))
            _follow(run, component, last, [to_root], edges, together)
    return edges


def _follow(
    run: Run, component: Component, at: int, effects: list[Effect], edges: set[Place], together: int
) -> None:
    """Add all that a component reads where it writes at a position, given what its write does to its reader."""
    match component:
        case ("head", layer, head, src):
            _follow_head(run, layer, head, at, src, effects, edges, together)
        case ("mlp", layer):
            _follow_mlp(run, layer, at, effects, edges, together)
        case _:
            pass


def _follow_mlp(
    run: Run, layer: int, at: int, effects: list[Effect], edges: set[Place], together: int
) -> None:
    reads = {component: write[at] for component, write in run.before_mlp[layer].items()}
    x = sum(reads.values(), np.zeros(run.w["token"].shape[1]))
    out, gates = run.mlp(layer, x), x @ run.w["W_in"][layer] > 0

    def live(change: Array) -> Array:
        return out - run.mlp(layer, x - change)

    def frozen(change: Array) -> Array:
        return change @ run.w["W_in"][layer] * gates @ run.w["W_out"][layer]

    def through(others: Array) -> list[Effect]:
        """What is read through the MLP, when the writes of others are already taken away from its input."""
        return [
            lambda change, effect=effect, gate=gate: effect(gate(others + change)) - effect(gate(others))
            for effect in effects
            for gate in (live, frozen)
        ]

    def matters(write: Array, others: Array) -> bool:
        return any(
            abs(effect(live(others + write)) - effect(live(others)))
            > max(NOTHING, CHANGED * abs(effect(out)))
            for effect in effects
        )

    read = [component for component, write in reads.items() if np.abs(write).max() > NOTHING]
    for component in read:
        for others in chain.from_iterable(combinations(read, n) for n in range(together + 1)):
            besides = sum((reads[other] for other in others), np.zeros_like(x))
            if component not in others and matters(reads[component], besides):
                edges.add((_site(component, at), mlp(layer, at), "input"))
                _follow(run, component, at, through(besides), edges, together)
                break


def _follow_head(
    run: Run,
    layer: int,
    head: int,
    dest: int,
    src: int,
    effects: list[Effect],
    edges: set[Place],
    together: int,
) -> None:
    here, reads = Site("head", layer, head, dest, src), run.before_attention[layer]
    x = sum(reads.values(), np.zeros_like(reads["embedding",]))[: dest + 1]
    before = float(run.patterns[layer][head, dest, src])
    W_VO = run.w["W_V"][layer, head] @ run.w["W_O"][layer, head]
    at_source = np.eye(dest + 1)[:, [src]]

    def changed(query: Array | float = 0.0, keys: Array | float = 0.0) -> float:
        return float(run.attend(layer, head, x[dest:] - query, x - keys)[0, src]) / before - 1

    by_query: list[Effect] = [lambda change: changed(query=change)]
    by_key: list[Effect] = [lambda change: changed(keys=at_source * change)]
    by_value: list[Effect] = [
        lambda change, effect=effect: effect(before * change @ W_VO) for effect in effects
    ]
    for component, write in reads.items():
        true: list[tuple[Side, int, list[Effect], bool]] = [
            ("query", dest, by_query, abs(changed(query=write[dest])) > CHANGED),
            ("key", src, by_key, abs(changed(keys=write[: dest + 1])) > CHANGED),
            ("value", src, by_value, any(abs(effect(write[src])) > NOTHING for effect in by_value)),
        ]
        for side, at, context, is_true in true:
            if is_true and np.abs(write[at]).max() > NOTHING:
                edges.add((_site(component, at), here, side))
                _follow(run, component, at, context, edges, together)


def edges_by_reader(
    w: Weights, ids: list[int], answer: int, wrong: int, *, all_keys: bool = True
) -> set[Place]:
    """All edges that each change what their own reader does, from the root down: its attention, or all that it writes,
    by more than 5%; a value or root edge if it moves anything. Without ``all_keys`` a component is taken away from the
    source alone."""
    run, last = Run(w, ids), len(ids) - 1
    direction = w["unembed"][answer] - w["unembed"][wrong]
    edges, done = set[Place](), set[Site]()

    def visit(component: Component, at: int) -> None:
        here = _site(component, at)
        if here in done:
            return
        done.add(here)
        match component:
            case ("head", layer, head, src):
                reads = run.before_attention[layer]
                x = sum(reads.values(), np.zeros_like(reads["embedding",]))[: at + 1]
                before = float(run.patterns[layer][head, at, src])
                W_VO = w["W_V"][layer, head] @ w["W_O"][layer, head]
                kept = np.ones((at + 1, 1)) if all_keys else np.eye(at + 1)[:, [src]]
                for c, write in reads.items():
                    query = run.attend(layer, head, x[at:] - write[at], x)[0, src]
                    key = run.attend(layer, head, x[at:], x - kept * write[: at + 1])[0, src]
                    moved = before * write[src] @ W_VO
                    for side, place, true in (
                        ("query", at, abs(query / before - 1) > CHANGED),
                        ("key", src, abs(key / before - 1) > CHANGED),
                        ("value", src, np.abs(moved).max() > NOTHING),
                    ):
                        if true and np.abs(write[place]).max() > NOTHING:
                            edges.add((_site(c, place), here, side))
                            visit(c, place)
            case ("mlp", layer):
                reads = run.before_mlp[layer]
                x = sum(reads.values(), np.zeros_like(reads["embedding",]))[at]
                out = run.mlp(layer, x)
                for c, write in reads.items():
                    without = run.mlp(layer, x - write[at])
                    if np.linalg.norm(out - without) > CHANGED * np.linalg.norm(out):
                        edges.add((_site(c, at), mlp(layer, at), "input"))
                        visit(c, at)
            case _:
                pass

    for component, write in run.final.items():
        if abs(float(write[last] @ direction)) > NOTHING:
            edges.add((_site(component, last), ROOT, "root"))
            visit(component, last)
    return edges
