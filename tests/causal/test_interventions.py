"""Interventions touch what they name and nothing else."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from headtrace.causal import GlobalEdit, Intervention, LocalEdit, Signal, edit, find_edge, intervene, run
from headtrace.causal.edges import residual_change
from headtrace.causal.intervention import _Acting, _global_hooks
from headtrace.causal.signals import random_channels
from headtrace.errors import InputError
from headtrace.models.attention import AttentionObserver, through
from headtrace.models.capture import full_precision_norms
from headtrace.models.partial import only_layers
from headtrace.vocabulary import Component
from tests.causal.traced import traced


class Watching(_Acting):
    """Acts, and keeps every layer's pattern and mixture."""

    def __init__(self, recording, interventions) -> None:
        super().__init__(recording, interventions)
        self.patterns, self.mixtures = {}, {}

    def mix(self, call, pattern):
        values = call.value.repeat_interleave(self.group, dim=1)
        self.mixtures[call.layer] = pattern @ values
        return self.mixtures[call.layer]

    def see(self, call, pattern) -> None:
        super().see(call, pattern)
        self.patterns[call.layer] = pattern.clone()


@torch.inference_mode()
def watch(recording, intervention, after_edits=None):
    """Two copies, the second one edited: residuals after every layer, patterns and mixtures."""
    model = recording.model
    both = [Intervention(()), intervention]
    observer, residuals = Watching(recording, both), {}
    layers = list(model.hf.get_submodule(model.architecture.layers).children())
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(_keep(residuals, index), with_kwargs=True).remove)
        if model.dtype == torch.float64:
            stack.enter_context(full_precision_norms(model))
        _global_hooks(recording, both, stack)
        if after_edits is not None:
            stack.callback(after_edits().remove)
        stack.enter_context(through(observer, model.hf))
        model.hf(input_ids=recording.token_ids.expand(2, -1), use_cache=False)
    return residuals, observer


def _keep(store, index):
    def hook(_, args, kwargs):
        store[index] = (args[0] if args else kwargs["hidden_states"]).clone()

    return hook


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
def test_a_local_edit_reaches_one_head_at_one_position_bit_for_bit(name: str, side: str) -> None:
    model, circuit = traced(name)
    recording = model.record(list(circuit.prompt.token_ids))
    signal = Signal.of(circuit, some_edge(circuit, side, model.n_layers))
    f = signal.firing
    _, plain = watch(recording, Intervention(()))
    residuals, edited = watch(recording, Intervention((edit(recording, signal),), f))
    for layer in range(f.layer):
        assert torch.equal(plain.patterns[layer], edited.patterns[layer])
    others = torch.ones_like(plain.patterns[f.layer][1, :, :, 0], dtype=torch.bool)
    others[f.head, f.dest] = False
    for before, after in (
        (plain.patterns[f.layer], edited.patterns[f.layer]),
        (plain.mixtures[f.layer], edited.mixtures[f.layer]),
    ):
        assert torch.equal(before[0], after[0]), "the other copy is untouched"
        assert torch.equal(before[1][others], after[1][others])
        assert not torch.equal(before[1, f.head, f.dest], after[1, f.head, f.dest])
    if f.layer + 1 < model.n_layers:
        after = residuals[f.layer + 1]
        kept = [t for t in range(recording.lengths[0]) if t != f.dest]
        plain_residuals, _ = watch(recording, Intervention(()))
        assert torch.equal(plain_residuals[f.layer + 1][1, kept], after[1, kept])


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
    plain, _ = watch(recording, Intervention(()))
    edited, _ = watch(recording, Intervention((change,)))
    moved = edited[1] - plain[1]
    assert not moved[0].any(), "the other copy is untouched"
    assert not moved[1, elsewhere].any(), "no other position changes"
    torch.testing.assert_close(moved[1], change.write, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2"])
def test_a_global_edit_of_a_head_moves_the_attention_output_alone(name: str) -> None:
    """The residual between attention and MLP moves by the write: what the MLP's norm, or the sum, then reads."""
    model, circuit = traced(name, torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    firing = Signal.of(circuit, circuit.top(1)[0]).firing
    signal = Signal(firing, "query", writer(recording, firing, "head"), (0, 3))
    change = edit(recording, signal, reach="global", scope="token")
    facts = model.architecture
    layer = model.hf.get_submodule(facts.layers)[0]
    outputs = []
    for what in (Intervention(()), Intervention((change,))):
        place = layer.get_submodule(facts.attention_post_norm or facts.attention)

        def keep(_, __, out) -> None:
            outputs.append((out[0] if isinstance(out, tuple) else out).clone())

        # Registered inside the run, after the edit's own hook, so that it sees what the layer gets.
        watch(recording, what, after_edits=lambda place=place, keep=keep: place.register_forward_hook(keep))
    moved = outputs[1] - outputs[0]
    assert not moved[0].any()
    torch.testing.assert_close(moved[1], change.write, rtol=0, atol=1e-12)
    assert not moved[1][[t for t in range(recording.lengths[0]) if t != firing.dest]].any()


def test_a_global_edit_of_the_embedding_is_what_layer_zero_reads() -> None:
    model, circuit = traced("llama", torch.float64)
    recording = model.record(list(circuit.prompt.token_ids))
    firing = Signal.of(circuit, circuit.top(1)[0]).firing
    change = edit(recording, Signal(firing, "query", Component("embedding"), (0,)), reach="global")
    assert change.write.norm() > 1e-3
    start = recording.residuals[:1, 0] + change.write
    with (
        torch.inference_mode(),
        full_precision_norms(model),
        through(AttentionObserver(), model.hf),
        only_layers(model, 0, model.n_layers, start),
    ):
        wanted = model.hf(input_ids=recording.token_ids, use_cache=False).logits[:, -1]
    outcome = run(recording, [Intervention((change,))])
    torch.testing.assert_close(outcome.logits, wanted, rtol=0, atol=1e-10)


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
    from headtrace.causal.edges import coefficients

    for name in ("gpt2", "gpt_neox", "qwen3", "gemma2"):
        model, circuit = traced(name, torch.float64)
        recording = model.record(list(circuit.prompt.token_ids))
        for side in ("query", "key"):
            signal = Signal.of(circuit, some_edge(circuit, side, model.n_layers))
            reader, wanted = coefficients(recording, signal, "claim")
            write = reader.in_residual(wanted)
            again = reader._turn((write / reader.norm_scale) @ reader.W / reader.head_scale) @ reader.bases[0]
            torch.testing.assert_close(again, wanted, rtol=0, atol=1e-9)


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
    changed = [edited.keys.abs().sum(-1).nonzero()[:, 0].tolist() for edited in (token, claim)]
    assert changed[0] == [f.src]
    assert changed[1] == list(range(f.dest - 4, f.dest + 1)), "every key in the window, none outside"
    assert torch.equal(token.keys[f.src], claim.keys[f.src])


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
    together = run(recording, many)
    for i, one in enumerate(many):
        alone = run(recording, [one])
        assert float(alone.attention[0]) == pytest.approx(float(together.attention[i]), abs=1e-12)
        torch.testing.assert_close(alone.logits[0], together.logits[i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_neox"])
def test_starting_in_the_middle_equals_the_full_run(name: str) -> None:
    model, circuit = traced(name)
    recording = model.record(list(circuit.prompt.token_ids))
    for start in range(model.n_layers):
        with torch.inference_mode(), only_layers(model, start, model.n_layers, recording.residuals[start]):
            logits = model.hf(input_ids=recording.token_ids, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, recording.last_logits(), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        again = model.hf(input_ids=recording.token_ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(again, recording.last_logits(), rtol=1e-5, atol=1e-5)  # and left as it was


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
    found = run(recording, [Intervention(tuple(edits), f)], attention_only=True).attention[0]
    assert float(found) == pytest.approx(float(wanted), abs=1e-12)
    assert intervene(circuit, model, circuit.edges_into(node)).attention_after == pytest.approx(float(wanted))


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
    offset = next(e for e in circuit.edges if circuit.node(e.source).kind == "offset")
    with pytest.raises(InputError, match="no component writes it"):
        intervene(circuit, model, offset, reach="global")
    with pytest.raises(InputError, match="goes to the root"):
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
