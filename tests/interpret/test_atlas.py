"""The atlas: measures that are what they say, tables that open again, the command from end to end."""

from __future__ import annotations

import json
import shutil

import polars as pl
import pytest
import torch

import headtrace
from headtrace.cli import main
from headtrace.errors import InputError
from headtrace.interpret.atlas import atlas, open_atlas
from headtrace.interpret.head_roles import MEASURES, RECORDED, HeadSums, roles_of_sums
from headtrace.interpret.rules import PairStatistics
from headtrace.interpret.scored_signals import Pair
from headtrace.interpret.writes import channel_reads
from headtrace.vocabulary import head_name
from tests.interpret.planted import any_texts
from tests.rounding import rounding
from tests.tiny import NAMES, prompts, tiny_model
from tests.truth.blueprint import Features, Head, as_gpt2
from tests.truth.known import KNOWN, blueprint


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    return atlas(model, "sampled:600", tmp_path_factory.mktemp("atlas"), channels="top:3", length=50)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def by_hand(pattern, ids) -> dict[str, list[float]]:
    """Each measure's terms by the definition, destination by destination."""
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    far, rest = 0.0, 0.0
    for d in range(1, len(ids)):
        row = [float(each) for each in pattern[d, : d + 1]]
        found["sink"].append(row[0])
        found["self"].append(row[d])
        found["entropy"].append(-sum(a * float(torch.tensor(a).log()) for a in row if a > 0))
        if d > 1:
            found["previous"].append(row[d - 1])
        same = [s for s in range(1, d) if ids[s] == ids[d]]
        if same:
            found["duplicate"].append(sum(row[s] for s in same))
            found["induction"].append(sum(row[s + 1] for s in same))
        far += sum(a * (d - s) for s, a in enumerate(row) if s)
        rest += sum(row[1:])
    return found | {"distance": [far / rest]}


def test_measures_of_heads_are_what_they_say(model) -> None:
    texts = ["When Mary and John went to the store, John gave a drink to Mary. Mary gave John a drink"]
    recording = model.record(texts)
    sums = HeadSums.empty(model)
    sums.add(recording)
    for layer, head in ((0, 1), (1, 2), (2, 3)):
        expected = by_hand(recording.patterns[layer, 0, head], recording.token_ids[0].tolist())
        for name, table in sums.measures().items():
            if name == "copying":
                continue
            terms = expected[name]
            allowed = rounding(torch.float32, 64 * len(recording.token_ids[0]))
            assert float(table[layer, head]) == pytest.approx(sum(terms) / len(terms), abs=allowed), name


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_copying_is_the_rank_of_the_token_read_by_what_the_head_adds_to_the_logits(name) -> None:
    """By the definition: what the head writes for one source, through the final norm's gain and the unembedding."""
    model = tiny_model(name)
    recording = model.record(prompts(lengths=(9,)))
    sums = HeadSums.empty(model)
    sums.add(recording)
    ids, weights = recording.token_ids[0].tolist(), model.weights
    for layer, head in ((0, 1), (1, 0)):
        total = weight = 0.0
        for src in range(1, len(ids)):
            value = recording.bare_values[layer, head, 0, src].double()
            write = model.architecture.centred(value @ weights.W_O[layer, head].double())
            logits = (write * weights.final_gain.double()) @ weights.W_U.double().T
            others = [float(logits[token] < logits[ids[src]]) for token in ids if token != ids[src]]
            read = float(recording.patterns[layer, 0, head, :, src].sum())
            total, weight = total + read * (2 * sum(others) / len(others) - 1), weight + read
        found = float(sums.measures()["copying"][layer, head])
        assert found == pytest.approx(total / weight, abs=rounding(torch.float32, 64 * len(ids)))


def test_by_chance_is_what_even_attention_would_give(model) -> None:
    recording = model.record(["When Mary and John went to the store, John gave a drink to Mary. Mary gave"])
    sums = HeadSums.empty(model)
    sums.add(recording)
    ids = recording.token_ids[0].tolist()
    even = torch.tril(torch.ones(len(ids), len(ids)))
    expected = by_hand(even / even.sum(-1, keepdim=True), ids)
    for name in ("sink", "previous", "duplicate", "induction"):
        terms = expected[name]
        found = sums.chances()[name]
        allowed = rounding(torch.float32, 64 * len(ids))
        assert float((found - sum(terms) / len(terms)).abs().max()) <= allowed, name


def _roles(model, texts) -> dict[str, set[str]]:
    sums = HeadSums.empty(model)
    for ids in texts:
        sums.add(model.record([list(ids)], keep=RECORDED))
    return {head_name(*place): {role.name for role in found} for place, found in roles_of_sums(sums).items()}


def test_planted_heads_have_the_roles_that_they_were_built_for() -> None:
    """Copying means that the token itself is said: the other models' heads write features that say another."""
    induction = KNOWN["induction"]
    found = _roles(induction.model, [case.ids for case in induction.cases(20)])
    assert "previous token" in found["L0H1"]
    assert {"induction", "copying"} <= found["L1H0"]
    assert "suppressing" not in found["L1H0"] | found["L0H1"]
    repeat = KNOWN["before repeat"]
    assert {"same token", "first token"} <= _roles(repeat.model, [c.ids for c in repeat.cases(20)])["L0H1"]


def test_a_head_that_writes_against_what_it_reads_is_suppressing() -> None:
    f = Features(token=12, position=12, previous=12, answer=12)
    heads = {
        (0, 0): Head(f["position"][1:], f["position"][:-1], f["token"], -f["answer"]),
        (0, 1): Head(f["position"][1:], f["position"][:-1], f["token"], f["answer"]),
        (0, 2): Head(f["position"][1:], f["position"][:-1], f["token"], f["answer"].roll(1, 0)),
    }
    found = _roles(headtrace.load(as_gpt2(blueprint(f, 1, heads))), any_texts(20))
    assert found["L0H0"] == {"previous token", "suppressing"}
    assert found["L0H1"] == {"previous token", "copying"}
    assert found["L0H2"] == {"previous token"}, "it says another token than it reads"


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_channels_sum_to_what_the_head_attends_by(name) -> None:
    """All channels together: attention-weighted logits, less their mean over the keys that are seen."""
    model = tiny_model(name)
    recording = model.record(prompts(lengths=(9,)), keep=RECORDED)
    sums = HeadSums.empty(model)
    sums.add(recording)
    ranks = headtrace.channels.terms.exact_channels(model).rank
    for layer in range(model.n_layers):
        seen = recording.visible[layer][0].double().clone()
        seen[:, 0] = 0
        logits, pattern = (
            recording.raw_logits(layer)[0].double(),
            recording.patterns[layer, 0].double() * seen,
        )
        mean = (logits * seen).sum(-1) / seen.sum(-1).clamp_min(1)
        whole = (pattern * logits).sum(-1) - pattern.sum(-1) * mean
        full = ranks[layer] == model.d_head
        size = float(sums.parts[layer].abs().sum(-1).max())
        error = (sums.parts[layer].sum(-1) - whole.sum(-1))[full].abs().max()
        assert float(error) <= rounding(
            torch.float32, 2 * model.d_head, max(size, float(logits.abs().max()) * 9)
        )
    assert torch.allclose(sums.shares().sum(-1), torch.ones_like(sums.shares()[..., 0]))


def test_embedding_reads_are_the_coefficients_of_a_lone_token() -> None:
    """Where positions do not turn and nothing else has been written, a token's query is its embedding's."""
    model = tiny_model("llama")
    recording = model.record([[7, 12, 7]])  # at position 0 the rotation is none
    exact = headtrace.channels.terms.exact_channels(model)
    a = recording.queries[0, 0, 1, 0].double() @ exact.to_query[0, 1]
    (reads,) = channel_reads(model, 0, [(1, 2)], most=61)
    coefficient = dict(reads.query)[7]
    assert coefficient == pytest.approx(float(a[2]), abs=rounding(torch.float32, 64, float(a.abs().max())))
    assert [token for token, _ in reads.opposite_query] == [token for token, _ in reversed(reads.query)]


def test_what_stands_out_is_frequent_here_and_rare_elsewhere() -> None:
    labels = {1: " the", 2: " Mary", 3: ".", 4: " and"}

    def pairs(ids: tuple[int, ...], count: int) -> list[Pair]:
        return [Pair("", 3, 1, 0.0, ids, tuple(labels[token] for token in ids))] * count

    top = PairStatistics(pairs((4, 2, 1, 2), 20))
    others = PairStatistics(pairs((4, 1, 3, 1), 100) + pairs((1, 2, 3, 4), 3))
    tokens = {(each.side, each.what) for each in top.tokens_beyond(others)}
    assert tokens == {("dest", " Mary"), ("src", " Mary")}
    relations = [each.what for each in top.relations_beyond(others)]
    assert "destination begins with a capital" in relations
    assert "the same token" not in relations, "it is as frequent elsewhere"


def test_an_atlas_opens_again_as_it_was_made(made) -> None:
    again = open_atlas(made.folder)
    assert again.heads.equals(made.heads)
    assert again.channels.equals(made.channels)
    assert again.pairs.equals(made.pairs)
    assert again.n_pairs == again.pairs.height
    assert again.heads.height == 12
    assert again.channels.height == 36
    shares = again.heads["shares"].to_list()
    assert all(sum(each) == pytest.approx(1) for each in shares)
    assert again.find("induction", 1)["head"][0] in {f"L1H{h}" for h in range(4)}
    one = again.channels["channel"][0]
    assert len(again.examples(one).top) == again.pairs.filter(pl.col("channel") == one).height
    for measure in ("cleverness", "shares"):
        with pytest.raises(InputError, match="no measure"):
            again.find(measure)


def test_one_head_and_one_channel_are_what_the_tables_say(made, model) -> None:
    again = open_atlas(made.folder, model)
    head = again.head(1, 2)
    row = made.heads.filter(pl.col("head") == "L1H2").row(0, named=True)
    assert head.measures == {name: row[name] for name in MEASURES}
    assert row["roles"] == ", ".join(role.name for role in head.roles)
    assert len(head.channels) == 3
    assert [head.shares[each] for each in head.channels] == sorted(head.shares, reverse=True)[:3]
    for number in head.channels:
        channel = again.channel(1, 2, number)
        examples = made.examples(channel.name)
        assert channel.top == examples.top
        assert channel.quantiles == examples.quantiles
        assert channel.share == head.shares[number]
        assert all(each.what in channel.words for each in channel.relations[:3])
        assert set(channel.reads) == {"query", "key", "opposite_query", "opposite_key"}
    assert "pairs" not in vars(again), "the pairs of other channels are not read"
    assert "scan" not in vars(again)
    for ask, says in (
        (lambda: again.head(7, 0), "no head L7H0"),
        (lambda: again.channel(7, 0, 1), "no head L7H0"),
        (lambda: again.channel(1, 2, 99), "no channel L1H2:99: it has"),
    ):
        with pytest.raises(InputError, match=says):
            ask()


def test_a_folder_that_is_no_atlas_or_of_other_weights_is_refused(made, tmp_path) -> None:
    with pytest.raises(InputError, match="is not an atlas: it has no"):
        open_atlas(tmp_path)
    with pytest.raises(InputError, match="has other weights"):
        open_atlas(made.folder, tiny_model("llama"))
    damaged = tmp_path / "damaged"
    shutil.copytree(made.folder, damaged)
    (damaged / "pairs.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="cannot be read"):
        open_atlas(damaged).channel(1, 2, made.head(1, 2).channels[0])
    about = json.loads((damaged / "atlas.json").read_text())
    for content, says in (
        (json.dumps({**about, "schema": "headtrace.atlas/1"}), "of the form"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ):
        (damaged / "atlas.json").write_text(content)
        with pytest.raises(InputError, match=says):
            open_atlas(damaged)


def test_the_command_writes_tables_and_pages_and_goes_on(tmp_path, capsys) -> None:
    out = tmp_path / "atlas"
    arguments = (
        "atlas",
        "builtin",
        "--corpus",
        "sampled:300",
        "--channels",
        "top:2",
        "--length",
        "50",
        "--out",
        out,
    )
    assert run(*arguments, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["heads"], said["channels"], said["tokens"]) == (12, 24, 300)
    assert {path.name for path in out.iterdir()} == {
        "atlas.json", "scan.safetensors", "heads.parquet", "channels.parquet", "pairs.parquet", "index.html", "heads",
    }  # fmt: skip
    assert len(list((out / "heads").iterdir())) == 12
    assert run(*arguments) == 0, "a second call reads what is there"
    assert "The heads that do it most" in capsys.readouterr().out
    assert run(*arguments, "--seed", "1") == 2
    assert "holds a scan with another" in capsys.readouterr().err


def test_a_bad_corpus_or_engine_ends_with_one_message(tmp_path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert run("atlas", "builtin", "--corpus", tmp_path / "empty.txt", "--out", tmp_path / "atlas") == 2
    assert "holds no text" in capsys.readouterr().err
    assert (
        run("atlas", "builtin", "--corpus", "sampled:100", "--channels", "most", "--out", tmp_path / "b") == 2
    )
    assert "neither channels nor a file" in capsys.readouterr().err
    asked = ("atlas", "builtin", "--corpus", "sampled:100", "--out", tmp_path / "c")
    for options, says in (
        (("--engine", "slurm"), "choose local or ray"),
        (("--ray-address", "a:1"), "engine='ray'"),
    ):
        assert run(*asked, *options) == 2
        assert says in capsys.readouterr().err


def test_why_says_beside_its_heads_what_they_do_over_the_corpus(made, tmp_path, capsys):
    prompt = "When Mary and John went to the store, John gave a drink to"
    asked = (
        "why",
        "builtin",
        "-p",
        prompt,
        "--counterfactual",
        prompt.replace(", John", ", Mary"),
        "--no-measure",
    )
    assert run(*asked, "--atlas", made.folder, "--out", tmp_path / "m.json") == 0
    screen = " ".join(capsys.readouterr().out.split())
    found = headtrace.load_mechanism(tmp_path / "m.json")
    heads = [head for step in found.steps for head in step.heads]
    assert any(head.roles for head in heads)
    for head in heads:
        known = made.head(head.layer, head.head).roles
        assert head.roles == tuple(map(str, known))
        assert all(str(role) in screen for role in known), "the number stands beside the name"
    assert "Over a corpus: " in found.to_markdown()
    assert run("why", "builtin", "-p", prompt, "--atlas", tmp_path) == 2
    assert "is not an atlas" in " ".join(capsys.readouterr().err.split())
