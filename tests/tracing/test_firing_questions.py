"""Firings in words, why here rather than there, why not here, and which writers met: exact, and true of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.causal import Intervention, Signal, edit, run
from headtrace.errors import IdentityError, InputError
from headtrace.tracing.pairs import _largest
from headtrace.tracing.rather_than import FiringParts, RatherThan
from headtrace.vocabulary import Firing
from tests.conftest import IOI
from tests.tiny import NAMES, prompts, tiny_model
from tests.truth.known import KNOWN

FAMILIES = ["gpt2", "opt", "gpt_neox", "llama", "qwen3", "gemma2", "gemma3_text", "olmo2"]
"""Biases, partial and scaled rotary positions, shared keys, QK-norm, windows, a softcap, post-norms."""


@pytest.fixture(scope="module")
def builtin():
    return headtrace.load("builtin")


def two_sources(recording, layer: int = 3, head: int = 1) -> tuple[Firing, Firing]:
    """The strongest and a weaker source of the last token."""
    dest = recording.lengths[0] - 1
    order = recording.pattern(layer)[0, head, dest].argsort(descending=True).tolist()
    return Firing(layer, head, dest, order[0]), Firing(layer, head, dest, order[2])


# -- in words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "L2H0:14:10",
        "L2H0 14->10",
        "L2H0:to#2:John#2",
        "l2h0 to#2->john#2",
        "L2H0:'to'#2:\"John\"#2",
        "L2H0:to#2:10",
        "L2H0",
    ],
)
def test_a_firing_is_the_same_in_numbers_and_words_everywhere(builtin, text: str) -> None:
    from headtrace.channels.terms import decompose
    from headtrace.tracing import moved

    recording, wanted = builtin.record(IOI), Firing(2, 0, 14, 10)
    tracer = headtrace.Tracer(builtin)
    assert recording.find_firing(text)[0] == wanted
    assert decompose(recording, text).firing == moved(recording, text).firing == wanted
    assert tracer.explain(IOI, text).firing == tracer.trace_firings(recording, [text])[0].firing == wanted
    circuit = tracer.trace(IOI, heads=[text])
    assert [n.site.firing for n in circuit.nodes if n.kind == "head" and n.layer == 2] == [wanted]
    assert headtrace.verify(circuit, builtin, edges="none").failures == ()


def test_what_was_taken_for_granted_is_said(builtin) -> None:
    alone = headtrace.Tracer(builtin).explain(IOI, "L2H0")
    assert alone.notice is not None
    assert "strongest pair" in alone.notice
    assert str(alone).startswith(alone.notice)
    assert alone.to_dict()["notice"] == alone.notice
    assert headtrace.Tracer(builtin).explain(IOI, "L2H0:to#2:John#2").notice is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("L2H0:to:John", r"could mean 3 pairs.*L2H0:to#2:John#2 \(attention 0\.998\).*L2H0:to#1:John#1"),
        ("L2H0:to:Mary", r"could mean 2 pairs"),
        ("L2H0:to", r"to#1 \(position 6\), to#2 \(position 14\)"),
        ("L2H0:to#3:Mary", "2 times, at 6, 14"),
        ("L2H0:Jon:Mary", "no token 'Jon'.*Did you mean 'John'"),
        ("L2H0:Mary:store", "does not see"),
        ("L2H0:99:1", "99->1 is outside the prompt"),
        ("L9H0:to:Mary", "no head L9H0"),
        ("to:Mary", "not a firing"),
    ],
)
def test_words_that_are_unclear_are_refused_with_the_choices(builtin, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        headtrace.Tracer(builtin).explain(IOI, text)


def test_a_word_of_several_tokens_is_refused_with_their_positions() -> None:
    from headtrace.vocabulary import TokenPlace

    with pytest.raises(InputError, match=r"several tokens, 'J' \(1\), 'enn' \(2\)\. Write the position"):
        TokenPlace.parse("Jenn").positions(("When", " J", "enn", " and"))
    assert TokenPlace.parse('"3"').positions(("1", "3", " 3")) == (1, 2)
    assert TokenPlace.parse("3").positions(("1", "3", " 3")) == (3,), (
        "a number is a position, unless it is in quotes"
    )


def test_an_edge_is_found_by_words(builtin) -> None:
    from headtrace.causal import find_edge

    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary", " John")
    edge = next(
        e for e in circuit.top(100) if e.side == "query" and circuit.node(e.target).name == "L2H0 14->10"
    )
    source = circuit.node(edge.source).name
    assert find_edge(circuit, source, "L2H0:to#2:John#2", "query") == edge
    assert find_edge(circuit, source, "L2H0:to:John", "query") == edge, "no other such pair is in the circuit"


def test_all_firings_of_a_prompt_are_listed_and_chosen(builtin) -> None:
    recording = builtin.record([IOI, "When Mary and John went to the store"])
    table = recording.firings(min=0.3)
    patterns = recording.patterns[:, 0]
    assert table.height == int((patterns >= 0.3).sum()) > builtin.n_layers * builtin.n_heads, (
        "more than one a head"
    )
    first = table.row(0, named=True)
    assert first["attention"] == pytest.approx(float(patterns.max()))
    assert table["attention"].is_sorted(descending=True)
    chosen = recording.firings(min=0.0, head="L2H0", dest="to#2", src="John")
    assert chosen["firing"].to_list() == ["L2H0 14->10", "L2H0 14->4"]
    assert chosen.row(0, named=True) | {"attention": 0} == {
        "firing": "L2H0 14->10",
        "layer": 2,
        "head": 0,
        "dest": 14,
        "src": 10,
        "from": "to",
        "to": "John",
        "attention": 0,
    }
    assert recording.firings(min=0.2, prompt=1)["dest"].max() < recording.lengths[1]
    assert recording.firings(min=1.1).is_empty()
    with pytest.raises(InputError, match="no token 'Jon'"):
        recording.firings(src="Jon")


# -- rather than ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["query", "key"])
def test_the_running_model_shows_the_ratio_without_the_largest_terms(name: str, side) -> None:
    """Each side adds up to the ratio, and so does the model with components taken out of one side."""
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    firing, other = two_sources(recording)
    parts = FiringParts.of(recording, headtrace.Tracer(model).composer, [firing, other])
    why = RatherThan.of(parts, model.name, recording.tokens())
    pattern = recording.pattern(firing.layer)[0, firing.head, firing.dest]
    true = float(pattern[firing.src].log() - pattern[other.src].log())
    assert why.log_ratio == pytest.approx(true, abs=1e-9)
    assert why.sum(side) + why.remainder == pytest.approx(true, abs=1e-9)
    assert sum(why.channels) + why.remainder == pytest.approx(true, abs=1e-9)
    terms = why.top(3, side)
    assert all(sum(term.channels) == pytest.approx(term.value, abs=1e-9) for term in terms)
    everything = tuple(range(model.d_head))
    signals = [Signal(firing, side, term.component, everything) for term in terms]
    changed = [
        Intervention(tuple(edit(recording, s, 0.0) for s in signals), each) for each in (firing, other)
    ]
    after = run(recording, changed).attention.tolist()
    measured = float(
        torch.tensor(after[0], dtype=torch.float64).log() - torch.tensor(after[1], dtype=torch.float64).log()
    )
    assert abs(measured - why.log_ratio) > 1e-2, "the case is not trivial"
    assert measured == pytest.approx(why.without(terms), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_sums_hold_in_single_precision_and_one_against_the_other_is_the_negative(name: str) -> None:
    model = tiny_model(name)
    recording = model.record(prompts()[0])
    firing, other = two_sources(recording)
    tracer = headtrace.Tracer(model)
    one = tracer.explain_recorded(recording, firing, rather_than=other.src).rather_than
    two = tracer.explain_recorded(recording, other, rather_than=firing.src).rather_than
    assert one.log_ratio == pytest.approx(-two.log_ratio, abs=1e-5)
    for side in ("query", "key"):
        assert torch.allclose(one.totals[side], -two.totals[side], atol=1e-4)
        assert one.frame().filter(side=side)["value"].sum() == pytest.approx(one.log_ratio, abs=1e-3)


def test_a_sum_that_is_wrong_stops_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    recording = model.record(prompts()[0])
    firing, other = two_sources(recording)
    right = FiringParts.key_totals
    monkeypatch.setattr(
        FiringParts, "key_totals", lambda self, row, slope: right(self, row, slope) * (1 + row)
    )
    with pytest.raises(IdentityError, match="the key side sums to"):
        headtrace.Tracer(model).explain_recorded(recording, firing, rather_than=other.src)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("John#2", "the source of L2H0 14->10 itself"),
        ("to", "could mean 2 tokens: write to#1"),
        ("Jon", "no token"),
        (20, "outside"),
    ],
)
def test_another_token_that_cannot_be_compared_is_refused(builtin, given, said: str) -> None:
    with pytest.raises(InputError, match=said):
        headtrace.Tracer(builtin).explain(IOI, "L2H0:14:10", rather_than=given)


def test_a_word_that_is_there_twice_means_the_one_that_is_not_the_source(builtin) -> None:
    why = headtrace.Tracer(builtin).explain(IOI, "L2H0:14:10", rather_than="John")
    assert why.rather_than is not None
    assert why.rather_than.other.src == 4


# -- why not -------------------------------------------------------------------------------------------------


def test_a_pair_without_attention_gets_no_causes_but_what_holds_it_down(builtin) -> None:
    why = headtrace.Tracer(builtin).explain(IOI, "L2H0:to#2:Mary")
    assert not why.attends
    assert why.instead is not None
    assert why.instead.other.src == 10
    assert why.instead.log_ratio < -3
    text = str(why)
    assert "does not attend to 'Mary'" in text
    assert "it attends to 'John' (10)" in text
    assert "without these signals" not in text, "no causes of what is not there"
    held = why.instead.lowest(5)
    assert all(term.value < 0 for term in held)
    assert ("suppresses 'Mary'" in text) == any(
        term.lowers_here for side in ("query", "key") for term in why.instead.lowest(6, side)
    )
    assert "raises 'John'" in text


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_parts_here_there_and_on_average_are_those_of_the_contribution_rows(name: str) -> None:
    """What suppresses is said against the average key: that average, row by row."""
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    firing, other = two_sources(recording)
    why = headtrace.Tracer(model).explain_recorded(recording, firing, rather_than=other.src).rather_than
    s = why.parts.scores
    for side, candidates in (("query", why.parts.query), ("key", why.parts.key)):
        for term in why.top(4, side):
            number = why.parts.index.number(term.component)
            flat = number * s.a.shape[-1] + torch.arange(s.a.shape[-1])
            row = candidates.rows(torch.zeros(1, dtype=torch.long), flat[None])[0].sum(0)
            assert term.here == pytest.approx(float(row[firing.src]), abs=1e-9)
            assert term.there == pytest.approx(float(row[other.src]), abs=1e-9)
            assert term.mean == pytest.approx(float(row[s.visible[0]].mean()), abs=1e-9)


# -- pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("compared", [False, True])
def test_pairs_are_the_largest_of_all_and_add_up(name: str, compared: bool) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    firing, other = two_sources(recording)
    than = other.src if compared else None
    why = headtrace.Tracer(model).explain_recorded(recording, firing, rather_than=than)
    logits = recording.raw_logits(firing.layer)[0, firing.head, firing.dest]
    total = float(logits[firing.src] - (logits[other.src] if compared else 0.0))
    found = why.pairs(25)
    assert found.total == pytest.approx(total, abs=1e-9)
    assert sum(pair.value for pair in found.pairs) + found.remainder == pytest.approx(total, abs=1e-9)
    assert all(sum(pair.channels) == pytest.approx(pair.value, abs=1e-9) for pair in found.pairs)
    # Every pair, from the recorded writes.
    everything = torch.arange(why.parts.index.n_components)
    a = why.parts.query_coefficients(everything) * recording.scales[firing.layer]
    b = why.parts.key_coefficients(0, everything)
    if compared:
        b = b - why.parts.key_coefficients(1, everything)
    values = (a @ b.T).flatten()
    assert float(values.sum()) == pytest.approx(total, abs=1e-8)
    largest = values.abs().sort(descending=True).values[:25]
    assert torch.allclose(torch.tensor([abs(p.value) for p in found.pairs], dtype=torch.float64), largest)
    assert found.frame()["value"].to_list() == [pair.value for pair in found.pairs]


@pytest.mark.parametrize("k", [1, 7, 400_000])
def test_no_large_pair_is_missed_among_many(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (1500, 1100))
    a *= torch.rand(1500, 1, generator=generator) ** 4
    q, c, values = _largest(a, b, k)
    everything = a @ b.T
    assert torch.equal(everything[q, c], values) or torch.allclose(everything[q, c], values)
    assert torch.allclose(values.abs(), everything.abs().flatten().topk(k).values)
    assert len(set(zip(q.tolist(), c.tolist(), strict=True))) == k


def test_figures_and_views_of_a_question(builtin, tmp_path) -> None:
    tracer = headtrace.Tracer(builtin)
    for than in (None, "Mary"):
        why = tracer.explain(IOI, "L2H0:14:10", rather_than=than)
        why.plot(tmp_path / "why.png")
        why.pairs(8).plot(tmp_path / "pairs.svg")
        assert (tmp_path / "why.png").stat().st_size > 5000
        assert "wrote the key" in (tmp_path / "pairs.svg").read_text()
        assert "<table>" in why._repr_html_()
        assert "all other pairs" in why.pairs(3)._repr_html_()
        assert why.frame().height == len(why.query) + len(why.key)


# -- defaults ------------------------------------------------------------------------------------------------


def test_without_an_answer_the_models_own_is_taken_and_said(builtin) -> None:
    tracer = headtrace.Tracer(builtin)
    own, given = tracer.trace(IOI), tracer.trace(IOI, " Mary", " John")
    assert own.root == given.root
    assert own.edges == given.edges
    assert "No answer was given" in own.summary()
    assert "No answer was given" not in given.summary()


def test_where_mlps_give_the_answer_the_complete_circuit_is_traced_and_said() -> None:
    known = KNOWN["fact"]
    case = known.cases(1)[0]
    tracer = headtrace.Tracer(known.model)
    empty = tracer.trace(list(case.ids), case.answer, case.wrong, paths="attention")
    assert not empty.edges
    assert "--paths complete" in (empty.reason or "")
    taken = tracer.trace(list(case.ids), case.answer, case.wrong)
    assert taken.edges
    assert "The circuit of attention is empty" in taken.summary()
    wanted = tracer.trace(list(case.ids), case.answer, case.wrong, paths="complete")
    assert (taken.nodes, taken.edges) == (wanted.nodes, wanted.edges)


def test_edges_and_nodes_are_read_without_looking_up_ids(builtin) -> None:
    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary", " John")
    top = circuit.top(3)
    assert isinstance(top, tuple)
    assert (
        list(top)
        == sorted((e for e in circuit.edges if e.side in ("query", "key")), key=lambda e: -e.weight)[:3]
    )
    assert repr(top).count("\n") == 2
    assert 'of L0H2 14->12 ("to" -> "a")' in repr(top)
    assert "<table>" in top._repr_html_()
    edges, nodes = circuit.frame(), circuit.frame("nodes")
    assert edges.height == len(circuit.edges)
    assert nodes.height == len(circuit.nodes)
    assert set(edges["unit"]) == {"attention", "logit difference"}
    with pytest.raises(InputError, match="'edges' and 'nodes'"):
        circuit.frame("arrows")


def test_a_module_is_called_what_its_user_calls_it(builtin, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    builtin.hf.save_pretrained(tmp_path / "finetuned")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    assert headtrace.load(module, builtin.tokenizer).name == "finetuned"
    named = headtrace.load(module, builtin.tokenizer, name="mine")
    assert named.name == "mine"
    assert named.record("When Mary").lengths == builtin.record("When Mary").lengths
    with pytest.raises(InputError, match="has a name of its own"):
        headtrace.load("builtin", name="mine")


def test_a_long_prompt_is_shortened_in_a_summary(builtin) -> None:
    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary", " John")
    text = "When Mary and John went to the store, " * 12 + "John gave a drink to"
    summary = replace(circuit, prompt=replace(circuit.prompt, text=text)).summary()
    assert len(summary.splitlines()[0]) < 260
    assert summary.splitlines()[0].endswith("drink to")
