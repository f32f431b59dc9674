"""ACC++ written out in loops, with every candidate row materialised: slow, plain, and independent of the fast path.

Uses only the recording's component writes, the model's weights and full d x d SVDs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headtrace.models import Recording
from headtrace.vocabulary import Component, Firing

STEPS = 64


@dataclass(frozen=True)
class NaiveSide:
    causes: dict[Component, tuple[tuple[int, ...], float]]
    predicted: float
    explained: bool


def upstream(rec: Recording, layer: int) -> list[tuple[Component, Tensor]]:
    """Every component below a layer with its write to all tokens (prompt 0)."""
    model, n = rec.model, rec.lengths[0]
    parts = [Component("embedding"), *([Component("position")] if rec.positions_apart else [])]
    for u in range(layer):
        parts += [Component("mlp", u), Component("attention_bias", u)]
        parts += [Component("head", u, h, j) for h in range(model.n_heads) for j in range(n)]
    return [(c, rec.write(c)) for c in parts]


def turn(rec: Recording, layer: int, x: Tensor) -> Tensor:
    """Rotary positions on (token, d_head)."""
    rotary = rec.rotary[layer]
    return x if rotary is None else rotary.rotate(x[None, None])[0, 0]


def channel_bases(rec: Recording, layer: int, head: int) -> tuple[Tensor, Tensor]:
    W_Q = rec.model.weights.W_Q[layer, head]
    W_K = rec.model.weights.W_K[layer, head // rec.model.weights.group]
    U, S, Vh = torch.linalg.svd(W_Q @ W_K.T)
    r = W_Q.shape[1]
    return torch.linalg.pinv(W_Q) @ U[:, :r] * S[:r], torch.linalg.pinv(W_K) @ Vh[:r].T


def contributions(rec: Recording, firing: Firing, side: str) -> tuple[list[Component], Tensor]:
    """Components, and their rows: (component, channel, key)."""
    l, h, d = firing.layer, firing.head, firing.dest
    weights, kv = rec.model.weights, firing.head // rec.model.weights.group
    to_query, to_key = channel_bases(rec, l, h)
    a = rec.queries[l, 0, h] @ to_query
    b = rec.keys[l, 0, kv] @ to_key
    scale_q = 1.0 if rec.query_scales is None else rec.query_scales[l, 0, h][:, None]
    scale_k = 1.0 if rec.key_scales is None else rec.key_scales[l, 0, kv][:, None]
    components, rows = [], []
    everything = [(c, write / rec.norm_scales[l, 0][:, None]) for c, write in upstream(rec, l)]
    for component, xhat in [*everything, (Component("offset", l, h), None)]:
        if side == "query":
            part = weights.b_Q[l, h].expand(len(b), -1) if xhat is None else xhat @ weights.W_Q[l, h]
            own = (turn(rec, l, part / scale_q) @ to_query)[d]
            row = own[:, None] * b.T
        else:
            part = weights.b_K[l, kv].expand(len(b), -1) if xhat is None else xhat @ weights.W_K[l, kv]
            own = turn(rec, l, part / scale_k) @ to_key
            row = a[d][:, None] * own.T
        components.append(component)
        rows.append(row * rec.scales[l])
    return components, torch.stack(rows)


def attention(rec: Recording, firing: Firing, logits: Tensor) -> Tensor:
    """Attention on the source for a row of logits, through softcap and mask."""
    cap = rec.softcaps[firing.layer]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    hidden = ~rec.visible[firing.layer][0, firing.dest]
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)[firing.src]


def naive_side(rec: Recording, firing: Firing, side: str, tau: float) -> NaiveSide:
    components, rows = contributions(rec, firing, side)
    logits = rec.raw_logits(firing.layer)[0, firing.head, firing.dest]
    visible = rec.visible[firing.layer][0, firing.dest]
    total = rows.sum((0, 1))
    assert torch.allclose(total[visible], logits[visible], rtol=1e-8, atol=1e-8)
    w = torch.zeros_like(logits)
    for i in range(STEPS + 1):
        point = (i / STEPS * logits).clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(attention(rec, firing, point), point)
        w += gradient * (0.5 if i in (0, STEPS) else 1.0) / STEPS
    attribution = (rows * w).sum(-1)
    order = attribution.flatten().sort(descending=True, stable=True).indices
    n_channels = rows.shape[1]
    left, before = logits.clone(), float(attention(rec, firing, logits))
    causes: dict[Component, tuple[tuple[int, ...], float]] = {}
    for number in order.tolist():
        c, k = divmod(number, n_channels)
        left = left - rows[c, k]
        now = float(attention(rec, firing, left))
        channels, weight = causes.get(components[c], ((), 0.0))
        causes[components[c]] = (tuple(sorted((*channels, k))), weight + before - now)
        before = now
        if now < tau:
            return NaiveSide(causes, now, True)
    return NaiveSide(causes, before, False)


def naive_circuit(
    rec: Recording, answer: int, wrong: int
) -> dict[tuple, tuple[float, frozenset[int] | None]]:
    """Edges of the linear root's circuit, by places: the recursion of ACC++, one firing at a time."""
    last, n_layers, weights = rec.lengths[0] - 1, rec.model.n_layers, rec.model.weights
    direction = (weights.W_U[answer] - weights.W_U[wrong]) * weights.final_gain
    if rec.model.architecture.norm == "layer":
        direction = direction - direction.mean()
    shares = [
        (c, float(write[last] @ direction / rec.norm_scales[-1, 0, last]))
        for c, write in upstream(rec, n_layers)
    ]
    total = sum(value for _, value in shares)
    if total <= 0:
        return {}
    running, cutoff = 0.0, -torch.inf
    for _, value in sorted(shares, key=lambda item: -item[1]):
        running += value
        if running > total:
            cutoff = value
            break
    seeds = [(c, value) for c, value in shares if value >= min(cutoff, total / 2)]
    if not any(c.kind == "head" for c, _ in seeds):
        return {}

    def place(c: Component, position: int) -> tuple:
        return (c.kind, c.layer, c.head, position, c.src)

    root = ("root", None, None, None, None)
    edges = {(place(c, last), root, "root"): (value, None) for c, value in seeds}
    constant = weights.W_U @ weights.final_bias + (0.0 if weights.b_U is None else weights.b_U)
    bias = float(constant[answer] - constant[wrong])
    if bias > 0:
        edges[(place(Component("offset"), last), root, "root")] = (bias, None)
    waiting = [Firing(c.layer, c.head, last, c.src) for c, _ in seeds if c.kind == "head"]
    seen: set[Firing] = set()
    while waiting:
        firing = waiting.pop()
        if firing in seen or firing.dest == 0:
            continue
        seen.add(firing)
        tau = min(0.9, 2.5 / int(rec.visible[firing.layer][0, firing.dest].sum()))
        if float(rec.patterns[firing.layer, 0, firing.head, firing.dest, firing.src]) < tau:
            continue
        for side, position in (("query", firing.dest), ("key", firing.src)):
            for c, (channels, weight) in naive_side(rec, firing, side, tau).causes.items():
                if c.kind == "head" and c.src > position:
                    continue  # written at other keys only: part of the claim, not a firing
                target = ("head", firing.layer, firing.head, firing.dest, firing.src)
                edges[(place(c, position), target, side)] = (weight, frozenset(channels))
                if c.kind == "head":
                    waiting.append(Firing(c.layer, c.head, position, c.src))
    return edges
