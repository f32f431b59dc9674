"""The fast path against the naive reference, and what must hold of every trace."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.tracing.causes import Causes
from headtrace.tracing.readings import Composer, Readings
from headtrace.vocabulary import Firing
from tests.oracle.comparison import Agreement, circuit_edges
from tests.rounding import rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two
from tests.tracing.naive import naive_circuit, naive_side


@pytest.mark.parametrize("name", NAMES)
def test_circuits_equal_the_naive_reference_on_every_architecture(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    ids = prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model, max_firings=None).trace(ids, answer, wrong, root="linear")
    agreement = Agreement()
    agreement.add(circuit_edges(circuit), naive_circuit(model.record(ids), answer, wrong))
    assert agreement.shared > 10, "the case is not trivial"
    assert agreement.single == 0, agreement.differing
    assert agreement.single_pairs == 0
    assert agreement.weight_error < 1e-8


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2"])
def test_one_firing_predicts_what_the_reference_predicts(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    tracer, recording = headtrace.Tracer(model), model.record(prompts()[0])
    strong = [f for f, a in recording.strongest_firings() if f.dest > 2 and a > 0.4]
    lowest = [f for f in strong if f.layer == 0][:1]  # alone: its components are the embedding and the offset
    firings = [f for f in strong if f.layer > 0][:3]
    assert lowest
    assert firings
    for found in [*tracer.trace_firings(recording, lowest), *tracer.trace_firings(recording, firings)]:
        agrees_with_the_reference(recording, found)


def agrees_with_the_reference(recording: headtrace.Recording, found: Causes) -> None:
    for side in ("query", "key"):
        naive = naive_side(recording, found.firing, side, found.threshold)
        mine = found.side(side)
        assert {c.component: c.channels for c in mine.causes} == {
            c: ks for c, (ks, _) in naive.causes.items()
        }
        assert mine.predicted == pytest.approx(naive.predicted, abs=1e-9)
        assert mine.explained == naive.explained
        taken = found.attention - mine.predicted
        assert sum(c.weight for c in mine.causes) == pytest.approx(taken, abs=1e-9)


def test_a_firing_that_no_head_upstream_matters_to_rests_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headtrace.tracing.accpp.FIRST_CHUNK", 2)  # so that no head is among the first
    model = tiny_model("llama", dtype=torch.float64)
    with torch.no_grad():
        for layer in model.layers:  # heads that write next to nothing
            layer.get_submodule("self_attn.o_proj").weight *= 1e-6
    recording = model.record(prompts()[0])
    strong = [f for f, a in recording.strongest_firings() if f.layer > 1 and f.dest > 2 and a > 0.3][:3]
    assert strong
    for found in headtrace.Tracer(model).trace_firings(recording, strong):
        agrees_with_the_reference(recording, found)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox"])
def test_alone_or_in_a_batch_the_circuit_is_the_same(name: str) -> None:
    model = tiny_model(name)
    ids = prompts(3, (11, 7, 9, 11))
    tracer = headtrace.Tracer(model)
    pairs = [top_two(model, one) for one in ids]
    together = tracer.trace_batch(
        [{"tokens": one, "answer": a, "wrong": w} for one, (a, w) in zip(ids, pairs, strict=True)]
    )
    agreement = Agreement()
    for one, (answer, wrong), circuit in zip(ids, pairs, together, strict=True):
        agreement.add(circuit_edges(circuit), circuit_edges(tracer.trace(one, answer, wrong)))
    assert agreement.single == 0
    assert agreement.pairs >= 0.999
    assert agreement.weight_error < 1e-4


def test_repeated_runs_give_the_same_bytes(tmp_path) -> None:
    model, ids = tiny_model("qwen2"), prompts()[0]
    answer, wrong = top_two(model, ids)
    tracer = headtrace.Tracer(model)
    files = []
    for name in ("a.json", "b.json"):
        tracer.trace(ids, answer, wrong).save(tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    headtrace.Tracer(model).trace(ids, answer, wrong).save(tmp_path / "c.json")
    assert files[0] == files[1] == (tmp_path / "c.json").read_bytes()
    assert headtrace.load_circuit(tmp_path / "a.json") == tracer.trace(ids, answer, wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("root", ["linear", "probability", "direction"])
def test_every_root_traces_every_architecture(name: str, root: str) -> None:
    model, ids = tiny_model(name), prompts()[0]
    answer, wrong = top_two(model, ids)
    tracer = headtrace.Tracer(model)
    if root == "linear":
        circuit = tracer.trace(ids, answer, wrong, root="linear")
        logits = model.end_logits([ids])[0]
        assert circuit.root.value == pytest.approx(float(logits[answer] - logits[wrong]), rel=1e-4, abs=1e-5)
    elif root == "probability":
        circuit = tracer.trace(ids, root="probability", top_k=3, paths="attention")
        assert len(circuit.root.support or ()) == 3
    else:
        vector = model.record(ids).residuals[3, 0, 5]
        circuit = tracer.trace(ids, direction=vector, layer=3, position=5)
        assert circuit.root.value == pytest.approx(float(vector.norm() ** 2), rel=1e-4)
        assert circuit.root.position == 5
        assert all(n.layer is None or n.layer < 3 for n in circuit.nodes)
    assert circuit.root.kind == root
    if circuit.reason is None:
        seeds = [edge for edge in circuit.edges if edge.side == "root"]
        assert any(circuit.node(edge.source).kind == "head" for edge in seeds)
        assert all(edge.weight > 0 for edge in seeds)
        assert circuit.influence_kept is None or 0 < circuit.influence_kept <= 1 + 1e-6
    else:
        assert circuit.edges == ()
        assert any(word in circuit.reason for word in ("no head", "nothing to explain", "no positive part"))


def test_probability_of_the_answer_and_top_p_choose_their_support() -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    answer, _ = top_two(model, ids)
    tracer = headtrace.Tracer(model)
    assert tracer.trace(ids, answer).root.support == (answer,)
    probabilities = model.record(ids).last_logits().softmax(-1)
    support = tracer.trace(ids, root="probability", top_p=0.6).root.support or ()
    assert float(probabilities[list(support)].sum()) >= 0.6
    assert float(probabilities[list(support[:-1])].sum()) < 0.6


def test_a_final_softcap_is_honoured_by_the_probability_root() -> None:
    """J is the log-likelihood that the model really gives, through its softcap."""
    model, ids = tiny_model("gemma2", dtype=torch.float64), prompts()[0]
    recording = model.record(ids)
    answer = int(recording.last_logits().argmax())
    circuit = headtrace.Tracer(model).trace(ids, answer)
    expected = float(recording.last_logits().log_softmax(-1)[answer])
    assert circuit.root.value == pytest.approx(expected, abs=1e-9)


def test_an_answer_less_likely_than_the_wrong_one_gives_an_empty_circuit_with_the_reason() -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model).trace(ids, wrong, answer)
    assert not circuit.edges
    assert "not above the wrong answer" in (circuit.reason or "")


def test_the_budget_cuts_the_least_influential_and_says_how_much_is_kept() -> None:
    model, ids = tiny_model("qwen2"), prompts(0, (24,))[0]
    answer, wrong = top_two(model, ids)
    full = headtrace.Tracer(model, max_firings=None).trace(ids, answer, wrong)
    n_full = sum(n.expanded for n in full.nodes)
    assert full.influence_kept == pytest.approx(1.0)
    small = headtrace.Tracer(model, max_firings=n_full // 2).trace(ids, answer, wrong)
    assert sum(n.expanded for n in small.nodes) == n_full // 2
    assert 0 < (small.influence_kept or 0) < 1
    picky = headtrace.Tracer(model, max_firings=None, min_influence=0.05).trace(ids, answer, wrong)
    assert all((n.influence or 0) >= 0.05 for n in picky.nodes if n.expanded)
    assert 0 < (picky.influence_kept or 0) < 1


def test_influence_is_conserved_from_the_root_to_the_leaves() -> None:
    from headtrace.circuits.graph import node_influence

    model, ids = tiny_model("gemma2"), prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model, max_firings=None).trace(ids, answer, wrong)
    computed = node_influence(circuit)
    for node in circuit.nodes:
        assert node.influence == pytest.approx(computed[node.id], abs=1e-6)
    leaves = sum(n.influence or 0 for n in circuit.nodes if not n.expanded and n.kind != "root")
    assert leaves == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "qwen3"])
@pytest.mark.parametrize("method", ["acc", "svt"])
def test_the_earlier_methods_give_circuits(name: str, method: str) -> None:
    model, ids = tiny_model(name), prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model, method=method).trace(ids, answer, wrong)
    assert circuit.method.name == method
    assert any(e.side == "query" for e in circuit.edges)
    if method == "svt":
        heads = {n.id for n in circuit.nodes if n.kind == "head"}
        assert all(e.source in heads for e in circuit.edges if e.side != "root"), "upstream heads only"
        everything = headtrace.Tracer(model, method="svt", channels="all").trace(ids, answer, wrong)
        sizes = {len(e.channels or ()) for e in everything.edges if e.side != "root"}
        assert sizes == {model.d_head}


def test_svt_starts_from_given_heads_at_the_last_token() -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    circuit = headtrace.Tracer(model, method="svt").trace(ids, heads=["L3H1", "L2H0"])
    seeds = [circuit.node(e.source) for e in circuit.edges if e.side == "root"]
    assert {(n.layer, n.head) for n in seeds} == {(3, 1), (2, 0)}
    assert all(n.dest == 10 for n in seeds)
    assert all(v is None for n in circuit.nodes for v in (n.predicted or {}).values()), "SVT predicts nothing"
    assert headtrace.verify(circuit, model, edges="none").predictions == ()
    assert "upstream heads" in str(headtrace.Tracer(model, method="svt").explain(ids, "L3H1:10:2"))
    with pytest.raises(InputError, match="no head L9H0"):
        headtrace.Tracer(model).trace(ids, heads=["L9H0"])
    with pytest.raises(InputError, match="not a firing"):
        headtrace.Tracer(model).trace(ids, heads=["9.0"])


def test_acc_components_make_up_the_relative_attention_inside_their_channels() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    recording = model.record(prompts()[0])
    firing = next(f for f, a in recording.strongest_firings() if f.layer == 3 and f.dest > 3 and a > 0.4)
    (found,) = headtrace.Tracer(model, method="acc").trace_firings(recording, [firing])
    to_query, to_key = model.channels.to_query[3, firing.head], model.channels.to_key[3, firing.head]
    a = recording.queries[3, 0, firing.head, firing.dest] @ to_query
    b = recording.keys[3, 0, firing.head // 2, : firing.dest + 1] @ to_key
    others = torch.cat((b[: firing.src], b[firing.src + 1 :]))
    terms = a * (b[firing.src] - others.mean(0)) * recording.scales[3]
    channels = found.query.causes[0].channels
    inside = float(terms[list(channels)].sum())
    assert inside >= float(terms.sum()) - 1e-9
    for side in (found.query, found.key):
        assert sum(c.weight for c in side.causes) >= inside - 1e-9
        without_last = sum(sorted((c.weight for c in side.causes), reverse=True)[:-1])
        assert without_last < inside


def test_explain_names_tokens_channels_and_the_prediction() -> None:
    model = tiny_model("llama")
    recording = model.record(prompts()[0])
    firing = next(f for f, a in recording.strongest_firings() if f.layer == 3 and f.dest > 3 and a > 0.4)
    why = headtrace.Tracer(model).explain(prompts()[0], str(firing))
    assert why.firing == firing
    assert why.attention == pytest.approx(
        float(recording.patterns[3, 0, firing.head, firing.dest, firing.src]), abs=1e-5
    )
    assert why.query
    assert why.key
    assert "query side" in str(why)
    assert "channels" in str(why)
    assert why.to_dict()["firing"]["layer"] == 3
    assert why.top(1)[0][1].weight == max(c.weight for c in (*why.query, *why.key))


@pytest.mark.parametrize(
    ("firing", "message"),
    [
        ("L9H0:3:1", "layers 0 to 3"),
        ("L1H0:30:1", "positions 0 to 10"),
        ("L1H0:2:5", "not visible"),
        ("L1:2", "not a firing"),
    ],
)
def test_firings_that_do_not_exist_are_explained(firing: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        headtrace.Tracer(tiny_model("llama")).explain(prompts()[0], firing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "no method 'magic'"),
        ({"tau": 1.5}, "tau=1.5"),
        ({"max_firings": 0}, "max_firings=0"),
        ({"min_influence": 2.0}, "min_influence"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        headtrace.Tracer(tiny_model("llama"), **options)


def test_contradictory_roots_are_refused() -> None:
    model = tiny_model("llama")
    tracer = headtrace.Tracer(model)
    with pytest.raises(InputError, match="same token"):
        tracer.trace(prompts()[0], 5, 5)
    with pytest.raises(InputError, match="no wrong answer"):
        tracer.trace(prompts()[0], 5, 6, root="probability")
    with pytest.raises(InputError, match="exactly one of"):
        tracer.trace(prompts()[0], 5, root="probability", top_k=3)
    with pytest.raises(InputError, match="needs an answer"):
        tracer.trace(prompts()[0], root="linear")


def test_a_firing_that_does_not_add_up_stops_the_trace_and_is_named() -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    recording = model.record(ids)
    recording = recording.with_tensors(mlp_writes=recording.mlp_writes + 0.05)
    firing = next(f for f, a in recording.strongest_firings() if f.layer == 3 and f.dest > 3 and a > 0.4)
    with pytest.raises(IdentityError, match=rf"L3H{firing.head} {firing.dest}->{firing.src}.*do not sum"):
        headtrace.Tracer(model).trace_firings(recording, [firing])


def test_a_rank_deficient_head_keeps_its_remainder_and_still_traces() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.hf.model.layers[3].self_attn.k_proj.weight[0:3] = 0.0
    ids = prompts()[0]
    assert (3, 0) in model.channels.deficient
    recording = model.record(ids)
    found = headtrace.Tracer(model).trace_firings(
        recording, [Firing(3, 0, 10, int(recording.patterns[3, 0, 0, 10].argmax()))]
    )
    assert found[0].query.causes


def test_firings_of_many_prompts_are_traced_together_as_one_by_one() -> None:
    model = tiny_model("llama")
    tracer, recording = headtrace.Tracer(model), model.record(prompts())
    firings, places = ["L2H1:5:0", "L3H0:6:2", "L2H1:5:0"], [0, 1, 1]
    together = tracer.trace_firings(recording, firings, places)
    alone = [tracer.trace_firings(recording, [f], p)[0] for f, p in zip(firings, places, strict=True)]
    assert [(c.prompt, c.site) for c in together] == [(c.prompt, c.site) for c in alone]
    channels = [[[k.channels for k in c.side(s).causes] for s in ("query", "key")] for c in together]
    assert channels == [[[k.channels for k in c.side(s).causes] for s in ("query", "key")] for c in alone]
    with pytest.raises(InputError, match="1 prompts for 3 firings"):
        tracer.trace_firings(recording, firings, [0])


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # heads that share values, heads that do not
def test_what_readers_read_of_many_prompts_is_what_each_reads_alone(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording, composer = model.record([*prompts(), prompts()[0][:5]]), Composer(model)
    values, last = recording.shared_values.flatten(0, 1), model.n_layers - 1
    first, second = (last, 0), (1, model.n_kv_heads - 1)
    # Several prompts for a reader, one prompt several times, readers of different layers.
    several = [(first, 0), (first, 2), (first, 2), (second, 1), (second, 0), (second, 1)]
    one_each = [(first, 1), (first, 1), (second, 1)]
    n = values.shape[2]
    heads, width = model.n_layers * model.n_heads, model.d_head
    for asked in (several, one_each):
        strength = torch.rand(len(asked), heads, n, dtype=torch.float64)
        read = Readings.of(composer, "key", values, asked, strength)
        components = torch.arange(heads * n).expand(len(asked), -1)
        found = read.at(None, components).unflatten(1, (heads, n))
        for f, ((layer, kv), prompt) in enumerate(asked):
            W = model.weights.W_O.flatten(0, 1) @ model.weights.W_K[layer, kv]
            alone = recording.bare_values.flatten(0, 1)[:, prompt] @ W
            alone[layer * model.n_heads :] = 0.0
            bound = rounding(torch.float64, model.d_model + width + heads * n, float(alone.abs().max()))
            assert (found[f] - alone).abs().max() <= bound
            assert (read.norms[f] - alone.norm(dim=-1)).abs().max() <= bound
            mixed = (strength[f, ..., None] * alone).sum(dim=1)
            assert (read.mixed(strength)[f] - mixed).abs().max() <= bound
            assert (read.total[f] - mixed.sum(dim=0)).abs().max() <= bound * heads


def test_values_read_through_the_residual_are_those_of_composed_weights() -> None:
    model, ids = tiny_model("llama", dtype=torch.float64), prompts()[0]
    recording = model.record([ids])
    values = recording.shared_values.flatten(0, 1)[:, :, :8]  # few enough tokens for that way
    wide = (len(values), 1, 8, model.weights.group, model.d_head)
    readers = [(0, 1), (3, 0), (1, 1), (3, 1), (2, 0)]
    for side in ("query", "key"):
        found = []
        for composed in (True, False):
            composer = Composer(model)
            composer.all_fit = composed
            into = {reader: ([0], values.new_full(wide, torch.nan)) for reader in readers}
            assert set(composer.read(side, values, into)) == set(readers)
            assert bool(composer.kept) is composed
            found.append(torch.stack([out for _, out in into.values()]))
        size = max(1.0, float(found[0].abs().max()))
        bound = rounding(torch.float64, model.d_model + model.d_head, size)
        assert (found[0] - found[1]).abs().max() <= bound
        assert found[1][0].eq(0).all()  # nothing is upstream of the first layer


def test_composed_weights_stay_within_their_budget_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny_model("llama", dtype=torch.float64), prompts()[0]
    answer, wrong = top_two(model, ids)
    expected = headtrace.Tracer(model).trace(ids, answer=answer, wrong=wrong)
    one_reader = 3 * model.n_heads * model.d_head**2 * 8  # of the last layer, in bytes
    monkeypatch.setattr("headtrace.tracing.readings.COMPOSED_BYTES", 2 * one_reader)
    tracer = headtrace.Tracer(model)
    tracer.composer.all_fit = True  # compose whatever it costs
    found = tracer.trace(ids, answer=answer, wrong=wrong)
    assert 0 < tracer.composer.held <= 2 * one_reader
    assert sum(tensor.nbytes for tensor in tracer.composer.kept.values()) == tracer.composer.held
    assert [(e.source, e.target, e.side) for e in found.edges] == [
        (e.source, e.target, e.side) for e in expected.edges
    ]
