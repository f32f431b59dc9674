"""Difference flow: exact at every cut and every node, nothing where nothing differs, derivatives in the limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.tracing.component_flow import DifferenceFlow
from headtrace.tracing.difference import DIFFERENCE_FIELDS, difference_flow
from headtrace.tracing.secants import NormSecant, SoftmaxSecant, activation_slope, softcap_slope
from headtrace.vocabulary import ROOT, Component, Site
from tests.tiny import MORE, NAMES, prompts, tiny_hf, tiny_model

EVERY = pytest.mark.parametrize("name", NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}
OTHERS = tuple(MORE)
"""Every other family that headtrace reads: mixtures, multipliers, windows, norms of every kind and place."""
IN_FLOAT32 = ("cohere", "cohere2", "ernie4_5")
"""These rotate in float32 whatever their dtype is, and are refused in float64."""


def roots(model: headtrace.Model) -> dict[str, Root]:
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(0)).tolist()
    return {
        "logit difference": LogitDifference((5,), (7, 9)),
        "above the mean": LogitDifference((5,)),
        "alternatives": Likelihood((5, 6)),
        "likeliest": Likelihood(top_k=3),
        "direction": Direction(model.n_layers // 2, 3, tuple(vector)),
        "heads": Heads((f"L{model.n_layers - 1}H1", "L1H2")),
    }


@cache
def pair(name: str, dtype: torch.dtype) -> tuple[headtrace.Recording, headtrace.Recording]:
    model = tiny_model(name, dtype=dtype)
    return model.record(prompts(0), keep=DIFFERENCE_FIELDS), model.record(prompts(1), keep=DIFFERENCE_FIELDS)


def changes(flow: DifferenceFlow) -> torch.Tensor:
    return flow.value - flow.other_value


@DTYPES
@EVERY
def test_flows_across_every_cut_sum_to_the_change_of_the_root(name: str, dtype: torch.dtype) -> None:
    """Embedding by embedding, and layer by layer, for every root."""
    clean, other = pair(name, dtype)
    for label, root in roots(clean.model).items():
        flow = difference_flow(clean, other, root)
        assert flow.error < ALLOWED[dtype], label
        whole = changes(flow)
        assert (whole.abs() > 0).all()
        size = torch.maximum(flow.embedding().abs().sum(1), whole.abs())
        torch.testing.assert_close(flow.embedding().sum(1) / size, whole / size, rtol=0, atol=ALLOWED[dtype])
        if label in ("direction", "heads"):  # these read below the top as well
            continue
        for layer in range(clean.model.n_layers + 1):
            product = (clean.residuals[layer] - other.residuals[layer]) * flow.residual[layer]
            error = (product.sum((1, 2)) - whole).abs() / product.abs().sum((1, 2))
            assert float(error.max()) < ALLOWED[dtype], (label, layer)


@DTYPES
@EVERY
def test_one_token_that_differs_carries_the_whole_change(name: str, dtype: torch.dtype) -> None:
    clean = pair(name, dtype)[0]
    ids = [list(each) for each in prompts(0)]
    ids[0][4], ids[1][5] = 17, 23
    other = clean.model.record(ids, keep=DIFFERENCE_FIELDS)
    flow = difference_flow(clean, other, LogitDifference((5,), (7, 9)))
    assert flow.error < ALLOWED[dtype]
    found, size = flow.embedding(), clean.last_logits().abs().max()
    assert (found != 0).nonzero().tolist() == [[0, 4], [1, 5]]
    torch.testing.assert_close(found.sum(1) / size, changes(flow) / size, rtol=0, atol=ALLOWED[dtype])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in OTHERS
        for dtype in ALLOWED
        if dtype == torch.float32 or name not in IN_FLOAT32
    ],
    ids=str,
)
def test_every_other_family(name: str, dtype: torch.dtype) -> None:
    """The identity at every cut, conservation at every node, and edges that sum to flows; every root."""
    clean, other = pair(name, dtype)
    for label, root in roots(clean.model).items():
        flow = difference_flow(clean, other, root)
        assert flow.error < ALLOWED[dtype], label
        size = torch.maximum(flow.embedding().abs().sum(1), changes(flow).abs())
        left = (flow.embedding().sum(1) - changes(flow)).abs() / size
        assert float(left.max()) < ALLOWED[dtype], label
    for site in (Site("mlp", 1, dest=10), Site("head", 1, 2, 10, 4)):
        edges = flow.edges(0, site, strongest=10**9)
        size = max(sum(abs(edge.flow) for edge in edges), abs(flow.flow(0, site)), 1e-3)
        assert abs(sum(edge.flow for edge in edges) - flow.flow(0, site)) < ALLOWED[dtype] * size


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
@torch.inference_mode()
def test_components_one_by_one_sum_to_the_change_at_every_layer(name: str) -> None:
    """By brute force: each component's own write in both runs, times the multiplier where a layer reads it."""
    clean, other = pair(name, torch.float64)
    flow = difference_flow(clean, other, LogitDifference((5,), (7,)))
    for prompt, n in enumerate(clean.lengths):
        for layer in range(clean.model.n_layers + 1):
            heads = [
                Component("head", l, h, s)
                for l in range(layer)
                for h in range(clean.model.n_heads)
                for s in range(n)
            ]
            mlps = [Component("mlp", l) for l in range(layer)]
            biases = [Component("attention_bias", l) for l in range(layer)]
            g = flow.residual[layer, prompt, :n]
            total = sum(
                float(((clean.write(c, prompt) - other.write(c, prompt)) * g).sum())
                for c in (Component("embedding"), *mlps, *biases, *heads)
            )
            assert total == pytest.approx(float(changes(flow)[prompt]), rel=1e-10, abs=1e-10)


@torch.inference_mode()
def by_channel(flow: DifferenceFlow, prompt: int, site: Site, side: str) -> tuple[torch.Tensor, float]:
    """What enters a head component through each channel of its queries or keys, and outside all of them: linear."""
    layer, head, dest = site.layer or 0, site.head or 0, site.dest or 0
    group = flow.recording.model.weights.group
    dq, dk, _ = flow.layers[layer].forward(flow.recording.residuals[layer] - flow.other.residuals[layer])
    query, keys, seen = flow.of_scores(prompt, site)
    to_query, to_key = flow.bases(layer, head)
    if side == "query":
        moved = dq[prompt, head, dest]
        mine, whole = (query @ to_key) * (moved @ to_query), query @ moved
    else:
        moved = dk[prompt, head // group, seen]
        mine, whole = ((keys @ to_query) * (moved @ to_key)).sum(0), (keys * moved).sum()
    return mine, float(whole - mine.sum())


@DTYPES
@EVERY
def test_what_flows_into_a_node_is_its_flow(name: str, dtype: torch.dtype) -> None:
    """Edges into every MLP, the root and many head components, on all sides together; channels are a part of them."""
    clean, other = pair(name, dtype)
    flow = difference_flow(clean, other, LogitDifference((5,), (7, 9)))
    everything = 10**9
    # The inverse of a head's weights has large entries, which float32 does not cancel as well.
    near = {"rel": 1e-3, "abs": 1e-5} if dtype == torch.float32 else {"rel": 1e-9, "abs": 1e-12}
    for prompt, n in enumerate(clean.lengths):
        last = n - 1
        sites = [ROOT, *(Site("mlp", l, dest=last) for l in range(4))]
        sites += [Site("head", l, l, last - 1 + l // 3, last - 2) for l in range(4)]
        for site in sites:
            edges = flow.edges(prompt, site, strongest=everything)
            size = max(sum(abs(edge.flow) for edge in edges), abs(flow.flow(prompt, site)), 1e-3)
            assert abs(sum(edge.flow for edge in edges) - flow.flow(prompt, site)) < ALLOWED[dtype] * size
            assert all(edge.source.kind != "attention_bias" for edge in edges)
        site = sites[-1]
        flows = flow.heads(3)
        for side in ("query", "key"):
            channels, remainder = by_channel(flow, prompt, site, side)
            whole = float(getattr(flows, side)[prompt, site.head, site.dest, site.src])
            assert float(channels.sum()) + remainder == pytest.approx(whole, **near)
            one = int(channels.abs().argmax())
            edges = flow.edges(prompt, site, channels=[one], strongest=everything)
            through = sum(edge.flow for edge in edges if edge.side == side)
            assert through == pytest.approx(float(channels[one]), **near)


@EVERY
def test_head_components_split_into_what_they_move_and_where_they_attend(name: str) -> None:
    clean, other = pair(name, torch.float64)
    flow = difference_flow(clean, other, Likelihood((5,)))
    for layer in range(4):
        found = flow.heads(layer)
        torch.testing.assert_close(found.moved, found.value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.attends, found.query + found.key, rtol=1e-9, atol=1e-12)
        assert not found.rounding.any()
        site = Site("head", layer, 1, 5, 2)
        assert flow.flow(0, site) == pytest.approx(float(found.flow[0, 1, 5, 2]), rel=1e-9, abs=1e-14)
        if clean.post_norm_scales is not None:  # there the norm's own change is shared among all heads
            continue
        write = clean.write(site.component, 0)[5] - other.write(site.component, 0)[5]
        expected = float(write @ flow.attention[layer, 0, 5])
        assert expected == pytest.approx(float(found.flow[0, 1, 5, 2]), rel=1e-9, abs=1e-12)


@EVERY
def test_nothing_flows_where_nothing_differs(name: str) -> None:
    clean, _ = pair(name, torch.float64)
    for root in roots(clean.model).values():
        flow = difference_flow(clean, clean, root)
        assert not changes(flow).any()
        assert not flow.embedding().any()
        assert not flow.mlps().any()
        assert not flow.heads(2).flow.any()


@EVERY
def test_the_other_way_round_the_difference_is_the_negative(name: str) -> None:
    clean, other = pair(name, torch.float64)
    root = LogitDifference((5,), (7, 9))
    forth, back = difference_flow(clean, other, root), difference_flow(other, clean, root)
    torch.testing.assert_close(changes(forth), -changes(back))
    torch.testing.assert_close(forth.embedding(), -back.embedding(), rtol=1e-8, atol=1e-11)


class _From(headtrace.models.observer.Observer):
    """Another embedding in the place of the model's own."""

    def __init__(self, embedding: torch.Tensor) -> None:
        self.embedding = embedding

    def layer_input(self, layer: int, residual: torch.Tensor, rotary: object) -> torch.Tensor | None:
        return self.embedding if layer == 0 else None


@EVERY
def test_multipliers_of_a_run_against_itself_are_its_gradient(name: str) -> None:
    """In the limit, a secant is a derivative: here PyTorch's own, through the model itself."""
    clean = pair(name, torch.float64)[0][0]
    flow = difference_flow(clean, clean, LogitDifference((5,), (7,)))
    embedding = clean.residuals[0].clone().requires_grad_()
    with torch.enable_grad():
        logits = clean.model.run(clean.token_ids, _From(embedding), grad=True)
        (gradient,) = torch.autograd.grad(logits[0, -1, 5] - logits[0, -1, 7], embedding)
    torch.testing.assert_close(flow.residual[0], gradient, rtol=1e-8, atol=1e-10)


def test_a_continuation_is_the_sum_over_its_tokens() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    first, second = ([*ids[:8], 11, 12] for ids in (prompts(0)[0], prompts(1)[0]))
    clean, other = (model.record(ids, keep=DIFFERENCE_FIELDS) for ids in (first, second))
    flow = difference_flow(clean, other, Likelihood((11, 12, 13), continuation=True))
    logs = [run.logits[0].log_softmax(-1) for run in (clean, other)]
    values = [float(log[7, 11] + log[8, 12] + log[9, 13]) for log in logs]
    assert [float(flow.value), float(flow.other_value)] == pytest.approx(values)
    assert float(flow.embedding().sum()) == pytest.approx(values[0] - values[1], rel=1e-10)
    wrong = model.record([*second[:8], 14, 12], keep=DIFFERENCE_FIELDS)
    with pytest.raises(InputError, match="end with the same tokens"):
        difference_flow(clean, wrong, Likelihood((11, 12, 13), continuation=True))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt_neox",
        "qwen3",
        "gemma2",
        "olmo2",
        "mixtral",
        "cohere",
        "falcon",
        "phi3",
        "granite",
        "nanochat",
    ],
)
def test_in_half_precision_rounding_is_one_part_of_the_flow(name: str) -> None:
    model = headtrace.load(tiny_hf(name).to(torch.bfloat16))
    clean, other = (model.record(prompts(seed), keep=DIFFERENCE_FIELDS) for seed in (0, 1))
    for root in roots(model).values():
        flow = difference_flow(clean, other, root)
        assert flow.error < 1e-5
        total = flow.embedding().sum(1) + flow.rounding.sum((0, 2))
        torch.testing.assert_close(total, changes(flow), rtol=1e-5, atol=1e-5)
        assert flow.rounding.any()
        flow.edges(0, Site("head", 1, 2, 10, 4))


def test_patterns_need_not_be_kept_and_a_pair_alone_is_the_same_as_in_a_batch() -> None:
    clean, other = pair("gemma2", torch.float64)
    root = LogitDifference((5,), (7,))
    expected = difference_flow(clean, other, root)
    again = [
        clean.model.record(prompts(seed), keep=DIFFERENCE_FIELDS, patterns="recompute") for seed in (0, 1)
    ]
    torch.testing.assert_close(difference_flow(*again, root).residual, expected.residual)
    short = difference_flow(clean[1], other[1], root)
    torch.testing.assert_close(short.residual[:, 0], expected.residual[:, 1, :7], rtol=1e-9, atol=1e-12)
    assert not expected.residual[:, 1, 7:].any()


def test_a_recording_that_does_not_add_up_is_refused_with_its_layer() -> None:
    clean, other = pair("llama", torch.float64)
    writes = clean.mlp_writes.clone()
    writes[2, 0, 5] *= 1.01
    with pytest.raises(IdentityError, match=r"MLP of layer 2 .*relative error"):
        difference_flow(clean.with_tensors(mlp_writes=writes), other, LogitDifference((5,), (7,)))
    residuals = clean.residuals.clone()
    residuals[2, 0, 5] *= 1.01
    with pytest.raises(IdentityError, match=r"layer [12] .*relative error"):
        difference_flow(clean.with_tensors(residuals=residuals), other, LogitDifference((5,), (7,)))


def test_pairs_that_cannot_be_compared() -> None:
    clean, other = pair("llama", torch.float64)
    with pytest.raises(InputError, match="equal length"):
        difference_flow(clean, other[0], LogitDifference((5,), (7,)))
    with pytest.raises(InputError, match="different models"):
        difference_flow(clean, pair("gpt2", torch.float64)[0], LogitDifference((5,), (7,)))
    with pytest.raises(InputError, match="1 roots for 2 pairs"):
        difference_flow(clean, other, [LogitDifference((5,), (7,))])


# -- secants -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-8, 1e-7, 1e-3, 3.0])
@pytest.mark.parametrize("act", [torch.nn.functional.gelu, torch.nn.functional.silu, torch.relu])
def test_activations_at_any_distance(gap: float, act: object) -> None:
    z = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    other = z + gap
    slope = activation_slope(act, z, other)
    torch.testing.assert_close(slope * (z - other), act(z) - act(other), rtol=0, atol=1e-14)
    assert float(slope.abs().max()) < 1.2


def test_softmax_norm_and_softcap_at_any_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(5, 8, dtype=torch.float64, generator=generator) * 10
    for gap in (0.0, 1e-9, 1.0, 300.0):
        two = one + gap * torch.randn(5, 8, dtype=torch.float64, generator=generator)
        secant = SoftmaxSecant.of((one, two))
        torch.testing.assert_close(secant(one - two), secant.difference, rtol=1e-9, atol=1e-14)
        log = one.log_softmax(-1)[:, 3] - two.log_softmax(-1)[:, 3]
        weights = torch.zeros_like(one).index_fill_(1, torch.tensor(3), 1.0)
        torch.testing.assert_close((secant.of_log(weights) * (one - two)).sum(-1), log, rtol=1e-9, atol=1e-13)
        capped = [3 * torch.tanh(z / 3) for z in (one, two)]
        made = softcap_slope((one, two), 3.0) * (one - two)
        torch.testing.assert_close(made, capped[0] - capped[1], rtol=1e-9, atol=1e-13)
        for kind in ("layer", "rms"):
            norm = NormSecant.of((one, two), 1e-6, kind, gain=2.0)
            centred = [x - x.mean(-1, keepdim=True) if kind == "layer" else x for x in (one, two)]
            normed = [2 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in centred]
            torch.testing.assert_close(norm.forward(one - two), normed[0] - normed[1], rtol=1e-9, atol=1e-13)
            g = torch.randn(5, 8, dtype=torch.float64, generator=generator)
            torch.testing.assert_close(
                (norm.back(g) * (one - two)).sum(), (norm.forward(one - two) * g).sum()
            )


def test_the_root_keeps_its_weights_of_the_clean_run() -> None:
    """Alternatives are weighted by the clean run's probabilities in both runs."""
    clean, other = (run[0] for run in pair("llama", torch.float64))
    flow = difference_flow(clean, other, replace(Likelihood(), answer=(5, 6)))
    weights = clean.last_logits()[[5, 6]].softmax(-1)
    values = [float(run.last_logits().log_softmax(-1)[[5, 6]] @ weights) for run in (clean, other)]
    assert [float(flow.value), float(flow.other_value)] == pytest.approx(values)
