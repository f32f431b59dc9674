"""Interventions touch what they name and nothing else."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.causal import (
    GlobalEdit,
    Intervention,
    LocalEdit,
    Signal,
    SignalChange,
    edit,
    find_edge,
    intervene,
    rerun,
    run,
)
from headtrace.causal.execute import Changes
from headtrace.causal.metric import metric_of
from headtrace.causal.signals import coefficients, random_channels, residual_change
from headtrace.errors import InputError
from headtrace.models import Observer
from headtrace.vocabulary import Component
from tests.causal.traced import traced
from tests.rounding import forward_terms, rounding
from tests.tiny import prompts, tiny_model


class Watching(Observer):
    """Keeps what every layer reads, attends to, mixes and writes."""

    def __init__(self) -> None:
        self.residuals, self.patterns, self.mixtures, self.writes = {}, {}, {}, {}

    def layer_input(self, layer, residual, rotary) -> None:
        self.residuals[layer] = residual.clone()

    def see(self, call, pattern) -> None:
        groups = pattern.shape[1] // call.value.shape[1]
        self.patterns[call.layer] = pattern.clone()
        self.mixtures[call.layer] = pattern @ call.value.repeat_interleave(groups, dim=1)

    def attention_write(self, layer, write) -> None:
        self.writes[layer] = write.clone()


def watch(recording, intervention) -> Watching:
    """Two copies, the second one edited."""
    seen = Watching()
    both = [Intervention(()), intervention]
    acting = Changes(recording.model, recording.lengths[0], both, recording.scales)
    recording.model.run(recording.token_ids.expand(2, -1), acting, seen)
    return seen


def near(recording, layer: int = 0) -> float:
    """How far two runs of the model may differ by rounding alone."""
    size = max(1.0, float(recording.residuals.abs().max()), float(recording.raw_logits(layer).abs().max()))
    return rounding(recording.model.dtype, forward_terms(recording.model), size)


def some_edge(circuit, side: str, layer_below: int, kind: str | None = None):
    """The heaviest edge of a side into a firing that has layers above it."""
    good = [
        e
        for e in circuit.top(500)
        if e.side == side
        and (circuit.node(e.target).layer or 0) < layer_below
        and (kind is None or circuit.node(e.source).kind == kind)
    ]
    assert good, "the circuit has such an edge"
    return good[0]


# In llama, qwen3 and gemma2 two heads share a key; gemma2 caps scores, opt scales queries, olmo2 has post-norms.
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_local_edit_reaches_one_head_at_one_position(name: str, side: str) -> None:
    model, circuit = traced(name)
    recording = model.record(list(circuit.prompt.token_ids))
    signal = Signal.of(circuit, some_edge(circuit, side, model.n_layers))
    f = signal.firing
    plain = watch(recording, Intervention(()))
    edited = watch(recording, Intervention((edit(recording, signal),), f))
    allowed = near(recording, f.layer)
    for layer in range(f.layer):
        assert float((plain.patterns[layer] - edited.patterns[layer]).abs().max()) <= allowed
    others = torch.ones_like(plain.patterns[f.layer][1, :, :, 0], dtype=torch.bool)
    others[f.head, f.dest] = False
    for before, after in (
        (plain.patterns[f.layer], edited.patterns[f.layer]),
        (plain.mixtures[f.layer], edited.mixtures[f.layer]),
    ):
        moved = (after - before).abs()
        assert float(moved[0].max()) <= allowed, "the other copy is untouched"
        assert float(moved[1][others].max()) <= allowed
        assert float(moved[1, f.head, f.dest].max()) > 100 * allowed
    if f.layer + 1 < model.n_layers:
        moved = (edited.residuals[f.layer + 1] - plain.residuals[f.layer + 1]).abs()
        kept = [t for t in range(recording.lengths[0]) if t != f.dest]
        assert float(moved[1, kept].max()) <= allowed


def writer(recording, firing, kind: str) -> Component:
    """A component of layer 0; of heads, one whose write at the firing's destination is not small."""
    if kind != "head":
        return Component(kind, None if kind == "embedding" else 0)
    head, src = divmod(int(recording.patterns[0, 0, :, firing.dest].argmax()), recording.lengths[0])
    return Component("head", 0, head, src)


# In a parallel layer (gpt_neox) nothing of layer 0 reads what layer 0 writes; elsewhere the MLP reads the attention.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "mlp") for name in ("gpt2", "llama", "gemma2", "olmo2", "gpt_neox")),
        ("gpt_neox", "head"),
        ("gpt_neox", "attention_bias"),
    ],
)
def test_a_global_edit_changes_exactly_the_components_write(name: str, kind: str) -> None:
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    firing = Signal.of(circuit, circuit.top(1)[0]).firing
    signal = Signal(firing, "query", writer(recording, firing, kind), (0, 3))
    change = edit(recording, signal, reach="global", scope="token")
    assert isinstance(change, GlobalEdit)
    assert change.write[firing.dest].norm() > 1e-6
    elsewhere = [t for t in range(recording.lengths[0]) if t != firing.dest]
    plain = watch(recording, Intervention(()))
    edited = watch(recording, Intervention((change,)))
    moved = edited.residuals[1] - plain.residuals[1]
    assert float(moved[0].abs().max()) <= near(recording), "the other copy is untouched"
    assert float(moved[1, elsewhere].abs().max()) <= near(recording), "no other position changes"
    torch.testing.assert_close(moved[1], change.write, rtol=0, atol=near(recording))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2"])
def test_a_global_edit_of_a_head_moves_the_attention_output_alone(name: str) -> None:
    """The residual between attention and MLP moves by the write: what the MLP's norm, or the sum, then reads."""
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    firing = Signal.of(circuit, circuit.top(1)[0]).firing
    signal = Signal(firing, "query", writer(recording, firing, "head"), (0, 3))
    change = edit(recording, signal, reach="global", scope="token")
    plain, edited = (watch(recording, what).writes[0] for what in (Intervention(()), Intervention((change,))))
    moved = edited - plain
    assert float(moved[0].abs().max()) <= near(recording)
    torch.testing.assert_close(moved[1], change.write, rtol=0, atol=near(recording))


def test_a_global_edit_of_the_embedding_is_what_layer_zero_reads() -> None:
    model, circuit = traced("llama", torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    firing = Signal.of(circuit, circuit.top(1)[0]).firing
    change = edit(recording, Signal(firing, "query", Component("embedding"), (0,)), reach="global")
    assert change.write.norm() > 1e-3
    start = recording.residuals[:1, 0] + change.write
    metric = metric_of(circuit.root, recording)
    logits = model.run(recording.token_ids, layers=range(model.n_layers), residual=start)
    outcome = run(recording, [Intervention((change,))], metric)
    wanted = float(metric.of_logits(logits[:, -1:])[0])
    assert float(outcome.metric[0]) == pytest.approx(wanted, abs=near(recording))
    assert abs(wanted - metric.of(recording)) > 1e-4


@pytest.mark.parametrize("side", ["query", "key"])
def test_the_factor_scales_the_signal_linearly(side: str) -> None:
    model, circuit = traced("qwen3", torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    signal = Signal.of(circuit, some_edge(circuit, side, model.n_layers))
    for reach, part in (("local", "query" if side == "query" else "keys"), ("global", "write")):
        removed, same, boosted, tripled = (
            getattr(edit(recording, signal, factor, reach), part) for factor in (0.0, 1.0, 2.0, 3.0)
        )
        assert not same.any()
        torch.testing.assert_close(boosted, -removed)
        torch.testing.assert_close(tripled, -2 * removed)


def test_a_signal_lies_in_its_channels_only() -> None:
    """Read again by the head, a residual signal has its coefficients and none in the other channels."""
    for name in ("gpt2", "gpt_neox", "qwen3", "gemma2"):
        model, circuit = traced(name, torch.float64)
        recording = model.record(list(circuit.prompt.token_ids))
        for side in ("query", "key"):
            signal = Signal.of(circuit, some_edge(circuit, side, model.n_layers))
            reader, wanted = coefficients(recording, signal, "claim")
            write = reader.in_residual(wanted)
            again = reader.read(write)
            # A pseudo-inverse loses the condition number of the projection.
            condition = float(torch.linalg.cond(reader.W))
            allowed = rounding(torch.float64, model.d_model, condition * float(wanted.abs().max()))
            torch.testing.assert_close(again, wanted, rtol=0, atol=allowed)


def test_scope_token_changes_the_source_alone_and_claim_every_visible_key() -> None:
    model, circuit = traced("mistral")  # a window of five tokens
    recording = model.record(list(circuit.prompt.token_ids))
    signal = next(
        s
        for e in circuit.top(500)
        if e.side == "key" and (s := Signal.of(circuit, e)).firing.dest > 6 and s.component.kind == "mlp"
    )
    f = signal.firing
    token, claim = (edit(recording, signal, scope=scope) for scope in ("token", "claim"))
    assert isinstance(token, LocalEdit)
    assert isinstance(claim, LocalEdit)
    changed = [edited.keys.abs().sum(-1).nonzero()[:, 0].tolist() for edited in (token, claim)]  # exact zeros
    assert changed[0] == [f.src]
    assert changed[1] == list(range(f.dest - 4, f.dest + 1)), "every key in the window, none outside"
    torch.testing.assert_close(token.keys[f.src], claim.keys[f.src])


@pytest.mark.parametrize("name", ["opt", "gemma3_text"])
def test_many_at_once_equal_one_at_a_time(name: str) -> None:
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    edges = [e for e in circuit.top(60) if circuit.node(e.source).kind != "offset"][::10]
    many = [
        Intervention((edit(recording, s, factor, reach),), s.firing)
        for s in (Signal.of(circuit, e) for e in edges)
        for factor, reach in ((0.0, "local"), (2.0, "global"))
    ]
    metric = metric_of(circuit.root, recording)
    together = run(recording, many, metric)
    for i, one in enumerate(many):
        alone = run(recording, [one], metric)
        assert float(alone.attention[0]) == pytest.approx(float(together.attention[i]), abs=near(recording))
        assert float(alone.metric[0]) == pytest.approx(float(together.metric[i]), abs=near(recording))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_neox"])
def test_starting_in_the_middle_equals_the_full_run(name: str) -> None:
    model, circuit = traced(name)
    recording = model.record(list(circuit.prompt.token_ids))
    allowed = near(recording) * float(recording.logits.abs().max())
    for start in range(model.n_layers):
        layers = range(start, model.n_layers)
        logits = model.run(recording.token_ids, layers=layers, residual=recording.residuals[start])
        torch.testing.assert_close(logits[0, -1], recording.last_logits(), rtol=0, atol=allowed)


@pytest.mark.parametrize("name", ["opt", "qwen3"])
def test_edits_of_query_and_keys_of_one_firing_act_together(name: str) -> None:
    """(q + dq) . (k + dk), with its product of changes, through the model's own softmax."""
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    node = next(n for n in circuit.heads() if {"query", "key"} <= {e.side for e in circuit.edges_into(n)})
    signals = [Signal.of(circuit, e) for e in circuit.edges_into(node)]
    edits = [edit(recording, s) for s in signals]
    f = signals[0].firing
    dq = sum(e.query for e in edits if e.query is not None)
    dk = sum(e.keys for e in edits if e.keys is not None)
    query = recording.queries[f.layer, 0, f.head, f.dest] + dq
    keys = recording.keys[f.layer, 0, f.head // model.weights.group] + dk
    scores = (keys @ query) * recording.scales[f.layer]
    seen = recording.visible[f.layer][0, f.dest]
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1)[f.src]
    found = run(recording, [Intervention(tuple(edits), f)]).attention[0]
    assert float(found) == pytest.approx(float(wanted), abs=near(recording, f.layer))
    assert intervene(circuit, model, circuit.edges_into(node)).attention_after == pytest.approx(float(wanted))


def test_a_metric_of_several_layers_is_read_whole_wherever_an_intervention_begins() -> None:
    """Heads of layers 1 and 3: an edit at layer 3 still reads the attention of both."""
    model, ids = tiny_model("gemma2", dtype=torch.float64), prompts(0)[0]
    circuit = headtrace.Tracer(model, tau=0.08).trace(ids, heads=["L3H1", "L1H0"])
    recording = model.record(ids)
    metric = metric_of(circuit.root, recording)
    edge = next(e for e in circuit.top(50) if circuit.node(e.target).layer == 3 and e.side != "root")
    changed = rerun(recording, [SignalChange(Signal.of(circuit, edge))])
    found = intervene(circuit, model, edge)
    assert found.metric_after == pytest.approx(metric.of(changed), abs=near(recording))
    assert found.metric_after - found.metric_before == pytest.approx(
        found.attention_after - found.attention_before, abs=near(recording)
    )


def test_random_channels_are_as_many_and_never_the_claimed_ones() -> None:
    draws = random_channels((1, 3, 5), 8, 50, torch.Generator().manual_seed(0))
    assert len(draws) == 50
    assert all(len(d) == 3 and not {1, 3, 5} & set(d) for d in draws)
    assert len({frozenset(d) for d in draws}) > 5
    assert random_channels(tuple(range(7)), 8, 1, torch.Generator().manual_seed(0)) == [(7,)]


def test_cosine_and_norm_ratio_are_those_of_the_residual() -> None:
    model, circuit = traced("llama", torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    signal = Signal.of(circuit, some_edge(circuit, "query", model.n_layers))
    f = signal.firing
    change = edit(recording, signal, reach="global", scope="token").write[f.dest]
    before = recording.residuals[f.layer, 0, f.dest]
    after = before + change
    cosine, ratio = residual_change(recording, signal)
    assert cosine == pytest.approx(float(before @ after / before.norm() / after.norm()))
    assert ratio == pytest.approx(float(after.norm() / before.norm()))


def test_bad_requests_say_why() -> None:
    model, circuit = traced("gpt2")
    recording = model.record(list(circuit.prompt.token_ids))
    offset = next(e for e in circuit.edges if circuit.node(e.source).kind == "offset" and e.side != "root")
    with pytest.raises(InputError, match="no component writes it"):
        intervene(circuit, model, offset, reach="global")
    with pytest.raises(InputError, match="goes to the root side of Root"):
        intervene(circuit, model, next(e for e in circuit.edges if e.side == "root"))
    with pytest.raises(InputError, match="no edge to intervene on"):
        intervene(circuit, model, [])
    edge = circuit.top(1)[0]
    source, target = circuit.node(edge.source).name, circuit.node(edge.target).name
    other = "key" if edge.side == "query" else "query"
    assert find_edge(circuit, source, target, edge.side) == edge
    assert find_edge(circuit, source, target.replace(" ", ":").replace("->", ":"), edge.side) == edge
    with pytest.raises(InputError, match=r"There is no .* edge from 'MLP 99 @1'"):
        find_edge(circuit, "MLP 99 @1", target, other)
    assert edit(recording, Signal.of(circuit, offset)), "a local one is possible"
