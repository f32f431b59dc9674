"""Many changes in one pass: against edited copies of the models, and against single interventions."""

from __future__ import annotations

import copy

import pytest
import torch

import headtrace
from headtrace.causal import (
    ComponentChange,
    Intervention,
    OtherRun,
    Patch,
    Signal,
    SignalChange,
    continued,
    intervene,
    metric_of,
    rerun,
    run,
)
from headtrace.errors import InputError
from headtrace.models.forward import continue_greedily, forward
from headtrace.models.observer import Observer
from headtrace.roots import LogitDifference
from headtrace.vocabulary import Component, Firing, Site
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two

LAYER, HEAD = 2, 1


@pytest.fixture(scope="module", params=NAMES)
def recording(request):
    return tiny_model(request.param, dtype=torch.float64).record(prompts()[0])


def close(changed, logits) -> None:
    model = changed.model
    bound = rounding(model.dtype, forward_terms(model), float(logits.abs().max()))
    # A random model can enlarge a rounding a thousandfold; a wrong change is off by 1e-2 or more.
    assert float((changed.logits - logits).abs().max()) < 1e3 * bound


def edited(recording, edit):
    """The output logits of a copy of the model that ``edit`` changed; a slow computation without observers."""
    hf = copy.deepcopy(recording.model.hf)
    model = headtrace.load(hf)
    with torch.no_grad():
        edit(model)
    model.invalidate()
    return model


def without_head(model) -> None:
    """The rows of W_O that read the head's mixture are zero; its part of the value bias stays in the write."""
    attention = model.layers[LAYER].get_submodule(model.architecture.attention)
    weights, d_head = model.weights, model.d_head
    kept = weights.b_V[LAYER, HEAD // weights.group]
    name, out = next(
        (n, m) for n, m in attention.named_modules() if n in ("c_proj", "o_proj", "out_proj", "dense")
    )
    rows = slice(HEAD * d_head, (HEAD + 1) * d_head)
    W = out.weight if name == "c_proj" else out.weight.T  # (heads * d_head, d_model)
    constant = kept @ W[rows].clone()
    W[rows] = 0.0
    if out.bias is not None:
        out.bias += constant
    else:
        out.bias = torch.nn.Parameter(constant)


def without_mlp(model) -> None:
    mlp = model.layers[LAYER]
    down = [
        m for n, m in mlp.named_modules() if n.endswith(("mlp.c_proj", "fc2", "dense_4h_to_h", "down_proj"))
    ]
    assert len(down) == 1
    for parameter in down[0].parameters():
        parameter.zero_()


def greedy(model, ids: list[int], n: int) -> list[int]:
    """Token by token over the whole text, without a cache."""
    found: list[int] = []
    for _ in range(n):
        found.append(int(forward(model, torch.tensor([[*ids, *found]]))[0, -1].argmax()))
    return found


CASES = [(Site("head", LAYER, HEAD), without_head), (Site("mlp", LAYER), without_mlp)]


@pytest.mark.parametrize(("site", "edit"), CASES, ids=["head", "mlp"])
def test_a_component_taken_away_everywhere_is_a_model_without_it(recording, site, edit) -> None:
    other, change = edited(recording, edit), [ComponentChange(site)]
    ids = recording.token_ids[0].tolist()
    close(rerun(recording, change), other.record(ids).logits)
    assert continued(recording, 4, change) == greedy(other, ids, 4)
    assert continued(recording, 4) == greedy(recording.model, ids, 4)


def test_a_factor_of_one_changes_nothing_and_factors_multiply(recording) -> None:
    sites = [Site("head", 1, 0, 9, 3), Site("head", 2, 3, 5), Site("head", 0, 1), Site("mlp", 1, dest=4)]
    sites += [Site("mlp", 3), Site("embedding", dest=2), Site("embedding"), Site("attention_bias", 1, dest=6)]
    signal = Signal(Firing(3, 1, 9, 8), "key", Component("mlp", 0), (0, 2))
    same = [ComponentChange(site, 1.0) for site in sites if _sees(recording, site)]
    close(rerun(recording, [*same, SignalChange(signal, 1.0, "global")]), recording.logits)
    site = Site("mlp", 1, dest=4)
    halves = rerun(recording, [ComponentChange(site, 0.5), ComponentChange(site, -2.0)])
    close(halves, rerun(recording, [ComponentChange(site, -1.0)]).logits)


def _sees(recording, site) -> bool:
    return site.src is None or bool(recording.visible[site.layer][0, site.dest, site.src])


def test_parts_taken_away_one_by_one_are_all_of_it(recording) -> None:
    length = recording.lengths[0]
    close(
        rerun(recording, [ComponentChange(Site("mlp", 1, dest=d)) for d in range(length)]),
        rerun(recording, [ComponentChange(Site("mlp", 1))]).logits,
    )
    seen = recording.visible[1][0]
    firings = [Site("head", 1, 2, d, s) for d in range(length) for s in range(d + 1) if bool(seen[d, s])]
    close(
        rerun(recording, [ComponentChange(site) for site in firings]),
        rerun(recording, [ComponentChange(Site("head", 1, 2))]).logits,
    )
    by_dest = [ComponentChange(Site("head", 1, 2, d)) for d in range(length)]
    by_source = [ComponentChange(Site("head", 1, 2, src=s)) for s in range(length)]
    close(rerun(recording, by_dest), rerun(recording, by_source).logits)


def test_nothing_at_all_leaves_the_biases_of_the_last_layers(recording) -> None:
    """Without embeddings, heads and MLPs, what is left is what attention biases write; without them, nothing."""
    model = recording.model
    every = [Site("embedding"), *(Site("mlp", l) for l in range(model.n_layers))]
    every += [Site("position")] * recording.positions_apart
    every += [Site("head", l, h) for l in range(model.n_layers) for h in range(model.n_heads)]
    none = rerun(
        recording, [ComponentChange(s) for s in [*every, *(Site("attention_bias", l) for l in range(4))]]
    )
    assert float(none.residuals.abs().max()) < 1e-9


def test_signals_are_changed_as_one_intervention_changes_them(recording) -> None:
    model, ids = recording.model, recording.token_ids[0].tolist()
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model, max_firings=12).trace(ids, answer, wrong)
    edges = [e for e in circuit.top(4) if circuit.node(e.source).kind != "offset"][:2]
    metric = metric_of(circuit.root, recording)
    for reach in ("local", "global"):
        found = intervene(circuit, model, edges, factor=-0.5, reach=reach)
        changed = rerun(recording, [SignalChange(Signal.of(circuit, e), -0.5, reach) for e in edges])
        assert metric.of(changed) == pytest.approx(found.metric_after, rel=1e-8, abs=1e-8)
        f = Signal.of(circuit, edges[-1]).firing
        after = float(changed.patterns[f.layer, 0, f.head, f.dest, f.src])
        assert after == pytest.approx(found.attention_after, rel=1e-8, abs=1e-9)


def test_a_change_at_a_position_stays_there_while_tokens_are_appended() -> None:
    """A prompt of the continuation so far, with the same change at its old place, predicts the next token."""
    recording = tiny_model("mistral", dtype=torch.float64).record(prompts()[0])
    changes = [ComponentChange(Site("mlp", 0, dest=10), 3.0), ComponentChange(Site("head", 1, 1, 10), 0.0)]
    changes += [ComponentChange(Site("head", 2, h, src=9), -3.0) for h in range(4)]  # soon out of the window
    changes.append(ComponentChange(Site("mlp", 3), 2.0))
    ids, found = recording.token_ids[0].tolist(), continued(recording, 4, changes)
    for n in range(4):
        longer = recording.model.record([*ids, *found[:n]])
        assert int(rerun(longer, changes).last_logits().argmax()) == found[n]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (ComponentChange(Site("root")), "A root writes nothing that can be changed"),
        (ComponentChange(Site("mlp")), "mlp of layer None"),
        (ComponentChange(Site("mlp", 99)), "layers 0 to 3"),
        (ComponentChange(Site("head", 1)), "Head None of layer 1"),
        (ComponentChange(Site("head", 1, 9)), "heads 0 to 3"),
        (ComponentChange(Site("mlp", 1, dest=99)), "Position 99 is outside"),
        (ComponentChange(Site("head", 1, 1, 3, 4)), "does not see position 4"),
        (ComponentChange(Site("head", 1, 1, src=99)), "Position 99 is outside"),
        (ComponentChange(Site("mlp", 1), float("nan")), "finite"),
        (SignalChange(Signal(Firing(2, 1, 9, 3), "key", Component("mlp", 0), (99,))), "no channel 99"),
        (SignalChange(Signal(Firing(2, 1, 9, 3), "key", Component("mlp", 2), (0,))), "not upstream of it"),
        (SignalChange(Signal(Firing(2, 1, 9, 3), "key", Component("head", 1, 0), (0,))), "one source"),
        (SignalChange(Signal(Firing(2, 1, 9, 3), "key", Component("root"), (0,))), "A root writes nothing"),
        (SignalChange(Signal(Firing(2, 1, 9, 30), "key", Component("mlp", 0), (0,))), "outside the prompt"),
    ],
)
def test_what_cannot_be_changed_is_refused_before_anything_runs(change, told) -> None:
    recording = tiny_model("gpt2").record(prompts()[0])
    with pytest.raises(InputError, match=told):
        rerun(recording, [change])


def test_a_continuation_ends_at_the_context() -> None:
    recording = tiny_model("gpt2").record(prompts()[0])
    with pytest.raises(InputError, match="beyond the context"):
        continued(recording, 64)


def test_a_continuation_that_fails_leaves_the_model_as_it_was() -> None:
    recording = tiny_model("gemma2").record(prompts()[0])
    hf = recording.model.hf
    how, calls = hf.config._attn_implementation, []

    class Failing(Observer):
        def mlp_write(self, layer: int, write: torch.Tensor) -> None:
            calls.append(layer)
            if len(calls) > recording.model.n_layers:
                raise ZeroDivisionError

    before = continued(recording, 3)
    with pytest.raises(ZeroDivisionError):
        continue_greedily(recording.model, recording.token_ids, 3, Failing())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hf.modules())
    assert hf.config._attn_implementation == how
    assert continued(recording, 3) == before


# -- patches from another run ----------------------------------------------------------------------------------


def test_all_components_of_another_run_are_that_run(recording) -> None:
    """Embeddings, heads and MLPs of another prompt, all patched in: the logits are those of the other prompt."""
    model = recording.model
    theirs = model.record([prompts(9)[0]])
    everything = Patch(OtherRun.of(theirs), all_but=("head", "mlp", "embedding"))
    close(rerun(recording, [everything]), theirs.logits)


@pytest.mark.parametrize("site", [Site("mlp", 2, dest=10), Site("head", 2, 1, 10), Site("embedding", dest=3)])
def test_a_patched_component_writes_what_it_wrote_in_the_other_run(recording, site) -> None:
    """Patched back from its own run, the model is as it was; from another, it is not."""
    model = recording.model
    own, other = (OtherRun.of(each) for each in (recording, model.record([prompts(9)[0]])))
    close(rerun(recording, [Patch(own, (site,))]), recording.logits)
    changed = rerun(recording, [Patch(other, (site,))])
    assert float((changed.logits - recording.logits).abs().max()) > 1e-6


def test_many_groups_of_patched_components_run_in_one_pass(recording) -> None:
    """Each node alone and in groups, from two other runs: in one batch as one by one."""
    model = recording.model
    sources = [OtherRun.of(model.record([prompts(seed)[0]])) for seed in (9, 4)]
    sites = [Site("mlp", 1, dest=10), Site("head", 2, 1, 10), Site("head", 3, 0), Site("embedding", dest=10)]
    groups = [*((site,) for site in sites), tuple(sites[:2]), tuple(sites)]
    many = [Intervention((Patch(source, group),)) for source in sources for group in groups]
    many.append(Intervention((Patch(sources[0], (sites[0],)), Patch(sources[1], (sites[1],)))))
    many.append(Intervention((Patch(sources[0], (sites[0],)), ComponentChange(Site("head", 1, 2), 0.5))))
    metric = LogitDifference(answer=(3,), wrong=(5,)).metric(recording)
    found = run(recording, many, metric).metric
    for value, intervention in zip(found, many, strict=True):
        alone = metric.of(rerun(recording, intervention.edits))
        assert float(value) == pytest.approx(alone, abs=1e-7)
    assert len({round(float(value), 9) for value in found}) == len(many)


def test_what_cannot_be_patched_is_refused() -> None:
    recording = tiny_model("gpt2").record(prompts()[0])
    source = OtherRun.of(recording)
    with pytest.raises(InputError, match="same in every run"):
        rerun(recording, [Patch(source, (Site("attention_bias", 1),))])
    with pytest.raises(InputError, match="layers 0 to 3"):
        rerun(recording, [Patch(source, (Site("mlp", 9),))])
    bare = OtherRun.of(recording.model.record([prompts(9)[0]], keep=("patterns", "values")))
    with pytest.raises(InputError, match="patching a mlp needs"):
        rerun(recording, [Patch(bare, (Site("mlp", 1),))])
