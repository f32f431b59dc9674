"""The scan: scores are the head's own, the highest pairs are the highest, and an interrupted scan loses nothing."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

import headtrace
from headtrace.channels.terms import exact_channels
from headtrace.errors import InputError
from headtrace.interpret import Scan, ScoredSignal, find_signals, scan
from headtrace.interpret.corpus import open_corpus
from headtrace.interpret.scan import PER_PAIR, PER_TEXT, PER_TOKEN, Drawn, Hits, Tally
from headtrace.interpret.scan_run import SAMPLE, TOP
from headtrace.interpret.scored_signals import score_blocks
from tests.rounding import rounding
from tests.starting import Started
from tests.tiny import NAMES, prompts, tiny_model

CHANNELS = ["L0H1:0", "L1H2:0", "L1H2:3+5+9", "L2H3:1"]


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def found(model):
    return scan(model, "sampled:640", CHANNELS, length=40, seed=3)


def same(one: Scan, other: Scan) -> bool:
    arrays, others = vars(one.tally), vars(other.tally)
    equal = all(np.array_equal(arrays[name], others[name], equal_nan=True) for name in arrays)
    return (
        equal
        and one.signals == other.signals
        and one.contexts == other.contexts
        and one.labels == other.labels
    )


# What is scored


@pytest.mark.parametrize("name", NAMES)
def test_all_channels_together_score_the_recorded_attention_logit(name) -> None:
    """Rotary positions, QK-norm, grouped keys, biases: the score is that of the head itself."""
    model = tiny_model(name)
    recording = model.record(prompts(), keep=["queries", "keys"])
    ranks = exact_channels(model).rank
    signals = [
        ScoredSignal(f"L{l}H{h}", l, h, "channel", tuple(range(int(ranks[l, h]))))
        for l in range(model.n_layers)
        for h in range(model.n_heads)
        if int(ranks[l, h]) == model.d_head
    ]
    assert signals
    for block in score_blocks(model, signals, 11):
        for prompt, length in enumerate(recording.lengths):
            made = block.scores(recording, prompt)
            logits = recording.raw_logits(block.layer)[prompt, block.head, :length, :length]
            a = recording.queries[block.layer, prompt, block.head, :length].double() @ block.to_query
            groups = block.head // model.weights.group
            b = recording.keys[block.layer, prompt, groups, :length].double() @ block.to_key
            size = float((a.abs() @ b.abs().mT).max()) * recording.scales[block.layer]
            assert float((made - logits).abs().max()) <= rounding(
                torch.float32, 2 * model.d_head, max(size, 1.0)
            )


def test_scores_of_channels_sum_to_the_score_of_all(model) -> None:
    recording = model.record("When Mary and John went to the store, John gave a drink to")
    every = "+".join(map(str, range(32)))
    signals = find_signals(model, [f"L1H2:{every}", *(f"L1H2:{channel}" for channel in range(32))])
    scores = torch.cat([block.scores(recording, 0) for block in score_blocks(model, signals, 15)])
    whole = scores[-1]  # the widest comes last
    size = float(scores[:-1].abs().sum(0).max())
    assert float((scores[:-1].sum(0) - whole).abs().max()) <= rounding(torch.float32, 64, size)


def brute_force(model, found, row):
    """Every pair of the corpus with its score and its tokens, by the definition."""
    one, pairs = found.signals[row], []
    channels = exact_channels(model)
    mine = list(one.channels)
    for chunk in open_corpus("sampled:640", model, length=40, seed=3).chunks():
        recording = model.record([list(chunk.token_ids)], keep=["queries", "keys"])
        a = (
            recording.queries[one.layer, 0, one.head].double()
            @ channels.to_query[one.layer, one.head][:, mine]
        )
        b = recording.keys[one.layer, 0, one.head].double() @ channels.to_key[one.layer, one.head][:, mine]
        scores = (a @ b.T * recording.scales[one.layer]).tolist()
        ids = chunk.token_ids
        pairs += [
            (scores[d][s], (chunk.index, d, s), (ids[: d + 1], s))
            for d in range(len(ids))
            for s in range(1, d + 1)
        ]
    return pairs


@pytest.mark.parametrize("row", range(len(CHANNELS)))
def test_the_highest_pairs_are_those_of_brute_force(model, found, row) -> None:
    pairs = brute_force(model, found, row)
    size = max(abs(pair[0]) for pair in pairs)
    allowed = rounding(torch.float32, 4 * 32, size)
    examples = found.examples(CHANNELS[row])
    assert [p.score for p in examples.top] == pytest.approx(highest_by_definition(pairs), abs=allowed)
    assert examples.top[0].score == pytest.approx(max(score for score, *_ in pairs), abs=allowed)
    scores = {where: score for score, where, _ in pairs}
    for score, *where in found._highest(row):
        assert scores[tuple(where)] == pytest.approx(score, abs=allowed)
    assert examples.n_pairs == len(pairs)
    assert found.n_tokens == 640


def highest_by_definition(pairs) -> list[float]:
    """The best of each destination and source, four of either per text, in two pools, then within all limits."""
    chosen = {}
    for chunk in {where[0] for _, where, _ in pairs}:
        own = sorted((pair for pair in pairs if pair[1][0] == chunk and pair[0] > 0), reverse=True)
        for side in (1, 2):
            best = {}
            for pair in own:
                best.setdefault(pair[1][side], pair)
            chosen |= {pair[1]: pair for pair in sorted(best.values(), reverse=True)[:PER_TEXT]}
    pooled = {}
    for side in (0, 1):
        limits = [
            lambda t: (t, 1),
            lambda t: (t[2:], PER_PAIR),
            lambda t, side=side: (("one side", t[2 + side]), PER_TOKEN),
        ]
        pooled |= {pair[1]: pair for pair in within(limits, chosen.values())[: 2 * TOP]}
    both = [
        lambda t: (t, 1),
        lambda t: (t[2:], PER_PAIR),
        lambda t: (("source", t[2]), PER_TOKEN),
        lambda t: (("to", t[3]), PER_TOKEN),
    ]
    found = [score for score, *_ in within(both, pooled.values())[:TOP]]
    return [score for score in found if score >= found[0] / 10]


def within(limits, pairs) -> list:
    """The highest pairs that keep all limits: functions from (prefix, source, its token, destination's) to a group."""
    seen, kept = Counter(), []
    for pair in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        prefix, src = pair[2]
        groups = dict(limit((prefix, src, prefix[src], prefix[-1])) for limit in limits)
        if all(seen[group] < most for group, most in groups.items()):
            kept.append(pair)
            seen.update(groups.keys())
    return kept


def test_the_highest_pairs_are_of_many_tokens_and_texts(found) -> None:
    for channel in CHANNELS:
        top = found.examples(channel).top
        ends = [(pair.token_ids[pair.src], pair.token_ids[pair.dest]) for pair in top]
        assert max(Counter(ends).values()) <= PER_PAIR
        for side in zip(*ends, strict=True):
            assert max(Counter(side).values()) <= PER_TOKEN
        assert max(Counter(pair.text for pair in top).values()) <= 2 * PER_TEXT


def test_examples_show_the_pairs_in_their_texts(model, found) -> None:
    examples = found.examples("L1H2:0")
    ids = {
        chunk.id: chunk.token_ids for chunk in open_corpus("sampled:640", model, length=40, seed=3).chunks()
    }
    for pair in (*examples.top, *examples.random, *examples.middle):
        assert 1 <= pair.src <= pair.dest < len(pair.token_ids)
        assert pair.token_ids == ids[pair.text][: len(pair.token_ids)]
        assert pair.tokens == model.token_labels(pair.token_ids)
    assert len(examples.random) == 120
    assert not {(p.text, p.dest, p.src) for p in examples.random} & {
        (p.text, p.dest, p.src) for p in examples.middle
    }
    quantiles = [score for _, score in examples.quantiles]
    assert quantiles == sorted(quantiles)
    assert all(pair.score > 0 for pair in examples.middle)
    assert "pairs whose source is the first token are left out" in examples.notes


def test_first_tokens_are_sources_only_when_asked_for(model) -> None:
    with_sinks = scan(model, "sampled:320", ["L1H2:0", "L2H0:0"], length=40, seed=3, sinks=True)
    assert (with_sinks.tally.top_src == 0).any() or (with_sinks.tally.sample_src == 0).any()
    without = scan(model, "sampled:320", ["L1H2:0", "L2H0:0"], length=40, seed=3)
    assert (without.tally.top_src != 0).all()
    assert (without.tally.sample_src != 0).all()


def test_a_signal_that_never_scores_above_zero_has_no_top_and_says_so(found) -> None:
    empty = Tally.empty(1, 3, 40, 8)
    quiet = Scan(found.signals[:1], found.options, empty)
    examples = quiet.examples(found.signals[0])
    assert examples.top == examples.middle == ()
    assert "no pair of the corpus scores above zero" in examples.notes


def test_layers_with_a_window_are_scored_where_they_see() -> None:
    model = tiny_model("mistral")
    found = scan(model, "sampled:60", ["L0H0:0", "L1H1:1"], length=30, top=4)
    assert (found.tally.top_dest - found.tally.top_src < 5).all(), "a window of five tokens"
    seen = np.isfinite(found.tally.sample_score[0])
    assert (found.tally.sample_dest - found.tally.sample_src < 5)[seen].all()
    assert seen.sum() == found.tally.n_pairs[0]


# Signals


def test_signals_of_a_circuit_are_its_query_and_key_edges(model) -> None:
    circuit = headtrace.Tracer(model).trace(
        "When Mary and John went to the store, John gave a drink to", " Mary", " John"
    )
    signals = find_signals(model, circuit)
    edges = [edge for edge in circuit.edges if edge.side in ("query", "key") and edge.channels]
    assert len(signals) == len(edges) > 0
    for one, edge in zip(signals, edges, strict=True):
        target = circuit.node(edge.target)
        assert (one.layer, one.head, one.side) == (target.layer, target.head, edge.side)
        assert set(one.channels) == set(edge.channels)
        assert one.id.endswith(f"{circuit.content_id}:{circuit.edges.index(edge)}")
    for asked in (circuit, [circuit], (each for each in signals)):
        assert scan(model, "sampled:80", asked, length=40).signals == signals


def test_top_channels_are_of_every_head(model) -> None:
    corpus = open_corpus("sampled:200", model, length=40)
    signals = find_signals(model, "top:3", corpus)
    assert len(signals) == 3 * 12
    assert len({one.id for one in signals}) == len(signals)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("L9H0:1", "no head L9H0"),
        ("L0H0:99", "no channel 99"),
        ("best", "neither channels nor a file"),
        ("top:0", "asks for no channels"),
        ([], "no signals to score"),
    ],
)
def test_signals_that_are_none_are_refused(model, asked, says) -> None:
    with pytest.raises(InputError, match=says):
        scan(model, "sampled:80", asked, length=40)


# What is kept


def test_the_same_seed_gives_the_same_scan_and_another_one_another_sample(model, found) -> None:
    assert same(scan(model, "sampled:640", CHANNELS, length=40, seed=3), found)
    text = scan(model, "task:ioi", CHANNELS, tokens=640, seed=0)
    other = scan(model, "task:ioi", CHANNELS, tokens=640, seed=1)
    assert not np.array_equal(text.tally.sample_key, other.tally.sample_key)


def test_saved_and_loaded_it_is_the_same(found, tmp_path) -> None:
    found.save(tmp_path)
    again = Scan.load(tmp_path)
    assert same(again, found)
    assert again.examples("L1H2:0") == found.examples("L1H2:0")
    assert again.options == found.options


def test_the_tally_is_the_same_in_whatever_order_and_parts_chunks_come() -> None:
    generator = np.random.default_rng(0)
    hits: list[Hits] = []
    for chunk in range(6):
        src, prefix = generator.integers(0, 50, 200), generator.integers(0, 40, 200)
        rows, scores = (
            generator.integers(0, 5, 200),
            generator.integers(0, 30, 200).astype(float),
        )  # many are equal
        # Many are the same pair in the same text, and of the same tokens.
        hits.append(
            Hits(rows, scores, chunk, generator.integers(0, 50, 200), src, prefix, src % 4, prefix % 4)
        )

    def counted(order):
        tally = Tally.empty(5, 1, 8, 16)
        for chunk in order:
            tally.add_hits([hits[chunk]])
            drawn = tally.draw(7, chunk, 20, 1)
            tally.add_drawn(drawn, np.tile(drawn.key, (5, 1)))
            tally.done += (1, 20)
        return tally

    whole, *others = counted(range(6)), counted(reversed(range(6)))
    for split in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [2], [], [4, 3, 1]]):
        merged = Tally.empty(5, 1, 8, 16)
        for part in split:
            merged.merge(counted(part))
        others.append(merged)
    for name, array in vars(whole).items():
        for other in others:
            assert np.array_equal(array, vars(other)[name]), name
    for row in range(5):
        for pool, limited in enumerate((whole.top_source_token, whole.top_dest_token)):
            filled = whole.top_chunk[row, pool] >= 0
            places = zip(whole.top_prefix[row, pool, filled], whole.top_src[row, pool, filled], strict=True)
            assert len(set(places)) == filled.sum() > 8
            assert max(Counter(limited[row, pool, filled].tolist()).values()) <= PER_TOKEN


def test_the_sample_is_uniform_over_all_pairs() -> None:
    counts = np.zeros((3, 20))
    for seed in range(400):
        tally = Tally.empty(1, 1, 1, 8)
        for chunk in range(3):
            drawn = tally.draw(seed, chunk, 20, 1)
            tally.add_drawn(drawn, np.zeros((1, len(drawn.key))))
        np.add.at(counts, (tally.sample_chunk, tally.sample_dest), 1)
    expected = 400 * 8 * np.arange(20) / (3 * 190)
    assert np.abs(counts - expected)[:, 1:].max() < 5 * np.sqrt(expected.max())


def test_what_is_kept_does_not_grow_with_the_corpus(model) -> None:
    short, long = (scan(model, f"sampled:{n}", ["L1H2:0"], length=20, top=3) for n in (1600, 6400))
    assert {k: v.shape for k, v in vars(short.tally).items()} == {
        k: v.shape for k, v in vars(long.tally).items()
    }
    limit = 3 + SAMPLE
    assert len(long.contexts) <= limit
    assert set(long.contexts) == long.tally.chunks
    drawn = long.tally.draw(0, 10**6, 128, 1)
    assert isinstance(drawn, Drawn)
    assert len(drawn.key) <= SAMPLE


def test_a_text_that_a_corpus_has_twice_shows_once(model, tmp_path) -> None:
    texts = [
        {"text": f"{name} and John went to the store, John gave a drink to {name}."}
        for name in ("Mary", "Anna")
    ]
    for name, lines in (("once", texts), ("thrice", texts * 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    once, thrice = (scan(model, tmp_path / f"{name}.jsonl", CHANNELS) for name in ("once", "thrice"))
    assert thrice.n_chunks == 3 * once.n_chunks
    for channel in CHANNELS:
        pairs = [(p.token_ids, p.dest, p.src) for p in thrice.examples(channel).top]
        assert len(set(pairs)) == len(pairs)
        assert set(pairs) == {(p.token_ids, p.dest, p.src) for p in once.examples(channel).top}


# Going on


ASKED = {"length": 16, "tokens": 6000, "heads": True}


def start(out: str) -> None:
    """A scan that says how far it is; for a process of its own."""
    model = headtrace.load("builtin")
    said = lambda done, of: print(done, flush=True)  # noqa: E731
    scan(model, "task:ioi", ["L1H2:0", "L0H1:3"], out=out, every=1, progress=said, **ASKED)


def test_a_scan_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(model, tmp_path) -> None:
    out = tmp_path / "killed"
    running = Started(start, str(out))
    assert running.stdout.readline(), "it got somewhere"
    running.close()
    begun = Scan.load(out)
    assert begun.n_chunks > 0
    resumed = scan(model, "task:ioi", ["L1H2:0", "L0H1:3"], out=out, **ASKED)
    whole = scan(model, "task:ioi", ["L1H2:0", "L0H1:3"], **ASKED)
    assert same(resumed, whole)
    assert torch.equal(resumed.heads.parts, whole.heads.parts)


def test_a_complete_scan_is_read_and_other_options_are_refused_by_name(model, tmp_path) -> None:
    first = scan(model, "sampled:80", ["L1H2:0"], out=tmp_path, length=40)
    assert same(scan(model, "sampled:80", ["L1H2:0"], out=tmp_path, length=40), first)
    for options, says in (
        ({"seed": 1}, "another (corpus|seed)"),
        ({"top": 5}, "another top: 60, now 5"),
        ({"sinks": True}, "another sinks"),
    ):
        with pytest.raises(InputError, match=says):
            scan(model, "sampled:80", ["L1H2:0"], out=tmp_path, length=40, **options)
    with pytest.raises(InputError, match="another signals"):
        scan(model, "sampled:80", ["L1H2:1"], out=tmp_path, length=40)


def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path) -> None:
    with pytest.raises(InputError, match="no scan"):
        Scan.load(tmp_path)
    (tmp_path / "scan.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="Delete it"):
        Scan.load(tmp_path)
