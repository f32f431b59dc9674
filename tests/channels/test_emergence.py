"""Following firings through checkpoints: what is measured, averaged and read from files."""

from __future__ import annotations

import json

import polars as pl
import pytest
import torch

import headtrace
from headtrace.channels import decompose
from headtrace.channels.emergence import Case, emergence, read_cases, step_of, strongest_cases
from headtrace.errors import InputError
from headtrace.figures.channels import plot_decomposition, plot_early_and_late
from headtrace.models.identities import tolerance_for
from headtrace.vocabulary import Firing
from tests.channels.counts import assert_reaches
from tests.channels.test_cli import run
from tests.figures.untouched import matplotlib_untouched
from tests.tiny import prompts, tiny_hf, tiny_model

IDS = tuple(prompts()[0])
CASES = [
    Case(IDS, Firing(1, 0, 7, 3)),
    Case(IDS, Firing(1, 0, 9, 2)),
    Case(tuple(prompts()[1]), Firing(3, 2, 6, 4), "a name"),
]


def aligned(strength: float) -> headtrace.Model:
    """A GPT-2 whose L1H0 is given a singular pair along the very tokens of the first case."""
    hf = tiny_hf("gpt2")
    recording = headtrace.load(hf).record(list(IDS))
    x = recording.residuals[1, 0] / recording.norm_scales[1, 0][:, None]
    x = x - x.mean(dim=-1, keepdim=True)
    block = hf.transformer.h[1]
    with torch.no_grad():
        for column, token in ((0, CASES[0].firing.dest), (hf.config.n_embd, CASES[0].firing.src)):
            # The norm's gain is folded into the weights, so it is taken out here.
            block.attn.c_attn.weight[:, column] += strength * x[token] / block.ln_1.weight
    return headtrace.load(hf)


@pytest.fixture(scope="module")
def found():
    models = [tiny_model("llama", seed) for seed in (0, 1, 2)]
    return emergence(zip(("step0", "step10", "step20"), models, strict=True), CASES, rotations=10)


def test_each_checkpoint_is_decomposed_on_its_own(found) -> None:
    for i, seed in enumerate((0, 1, 2)):
        model = tiny_model("llama", seed)
        why = decompose(model.record(list(IDS)), CASES[0].firing)
        row = found.frame.filter((pl.col("case") == 0) & (pl.col("step") == i * 10)).row(0, named=True)
        # Alone and in a batch the model itself adds up in another order: it is float32, and so far exact.
        within = tolerance_for(torch.float32) * float(why.relative_terms.abs().sum())
        torch.testing.assert_close(found.relative_terms[i, 0], why.relative_terms, rtol=0, atol=within)
        assert row["sparseness"] == pytest.approx(why.sparseness, rel=1e-3)
        assert_reaches(int(row["n_recon"]), why.relative_terms, within)
    assert found.checkpoints == ["step0", "step10", "step20"]
    assert found.labels[0] == (f"#{IDS[7]}", f"#{IDS[3]}")


def test_means_are_over_heads_and_n_recon_only_where_there_is_attention_to_explain(found) -> None:
    summary = found.summary()
    row = summary.filter(
        (pl.col("checkpoint") == "step10") & (pl.col("measure") == "sparseness") & (pl.col("basis") == "true")
    ).row(0, named=True)
    values = found.frame.filter(pl.col("checkpoint") == "step10")["sparseness"].to_list()
    heads = [(values[0] + values[1]) / 2, values[2]]
    mean = sum(heads) / 2
    half = 12.7062 * (abs(heads[0] - heads[1]) / 2**0.5) / 2**0.5  # Student's t with one degree of freedom
    assert row["heads"] == 2
    assert row["mean"] == pytest.approx(mean)
    assert row["high"] - row["mean"] == pytest.approx(half, rel=1e-4)
    assert row["mean"] - row["low"] == pytest.approx(half, rel=1e-4)
    for checkpoint in found.checkpoints:
        attended = found.frame.filter((pl.col("checkpoint") == checkpoint) & (pl.col("relative") > 0))
        row = summary.filter(
            (pl.col("checkpoint") == checkpoint)
            & (pl.col("measure") == "n_recon")
            & (pl.col("basis") == "true")
        ).row(0, named=True)
        assert row["heads"] == attended.select("layer", "head").n_unique()
        assert (row["mean"] is None) == attended.is_empty()


def test_a_head_that_aligns_with_its_tokens_becomes_sparser_than_its_rotations() -> None:
    """What the figure over training is for: sparseness falls in the singular basis, not in rotated ones."""
    stages = ((f"step{s}", aligned(s / 10)) for s in (0, 1, 10))
    frame = emergence(stages, CASES[:1], rotations=50).frame
    true, rotated = frame["sparseness"].to_list(), frame["sparseness_basis"].to_list()
    assert true[0] > true[1] > true[2]
    assert true[2] < 0.15, "one channel of eight does nearly all: the least there is is 0.125"
    assert min(rotated) > 0.3


def test_strongest_cases_are_sharp_one_per_head_and_not_trivial() -> None:
    model = tiny_model("llama")
    cases = strongest_cases(model, prompts(), n=6)
    assert len({(c.firing.layer, c.firing.head) for c in cases}) == 6
    assert all(0 < c.firing.src < c.firing.dest and c.firing.dest >= 3 for c in cases)
    best = 0.0
    for ids in prompts():
        pattern = model.record(ids).patterns[:, 0]
        for dest in range(3, len(ids)):
            best = max(best, float(pattern[:, :, dest, 1:dest].max()))
    first = cases[0]
    attention = model.record(list(first.prompt)).patterns[
        first.firing.layer, 0, first.firing.head, first.firing.dest, first.firing.src
    ]
    assert float(attention) == pytest.approx(best)


def test_steps_are_read_from_the_names_of_checkpoints() -> None:
    assert step_of("step1000") == 1000
    assert step_of("checkpoint-50") == 50
    assert step_of("final") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"firing": "L0H0:3:1"}', "either 'text' or 'tokens'"),
        ('{"tokens": "5,6", "firing": "L0H0:3:1"}', "list of token ids"),
        ('{"text": 5, "firing": "L0H0:3:1"}', "must be a string"),
        ('{"tokens": [5, 6], "firing": "H0"}', "not a firing"),
    ],
)
def test_a_damaged_file_of_firings_is_named_with_its_line(tmp_path, line: str, message: str) -> None:
    file = tmp_path / "firings.jsonl"
    file.write_text('{"tokens": [5, 6, 7], "firing": "L0H0:2:1"}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_cases(file)


def test_no_file_no_firings_no_checkpoints_are_errors(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_cases(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no firings"):
        read_cases(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="No checkpoints"):
        emergence([], CASES)
    with pytest.raises(InputError, match="does not see"):
        emergence([("a", tiny_model("llama"))], [Case(IDS, Firing(0, 0, 2, 5))])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    base = tmp_path_factory.mktemp("run")
    for seed in (0, 1):
        tiny_hf("gpt2", seed).save_pretrained(base / f"step{seed * 100}")
    return [str(base / "step0"), str(base / "step100")]


def test_emerge_follows_given_firings_and_writes_figures(folders, tmp_path, capsys) -> None:
    lines = [{"tokens": list(IDS), "firing": "L1H0:7:3"}, {"tokens": list(IDS), "firing": "L2H1 9->4"}]
    file = tmp_path / "firings.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    out = {name: str(tmp_path / name) for name in ("a.png", "b.png", "c.json")}
    code = run(
        *("emerge", *folders, "--firings", str(file), "--rotations", "5"),
        *("--png", out["a.png"], "--bars", out["b.png"], "--out", out["c.json"]),
    )
    assert code == 0
    shown = capsys.readouterr().out
    assert "2 firings of 2 heads" in shown
    assert "step100" in shown
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert len(numbers["firings"]) == 4
    assert {row["step"] for row in numbers["summary"]} == {0, 100}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_emerge_picks_the_strongest_firings_of_the_last_checkpoint(folders, capsys) -> None:
    tokens = ",".join(map(str, IDS))
    assert run("emerge", *folders, "--tokens", tokens, "--top", "3", "--rotations", "5") == 0
    assert "3 firings of 3 heads" in capsys.readouterr().out


def test_emerge_says_what_is_missing(folders, capsys) -> None:
    assert run("emerge", folders[0], "--tokens", "5,6,7") == 2
    assert "several folders" in capsys.readouterr().err
    assert run("emerge", *folders) == 2
    assert "--firings" in capsys.readouterr().err
    assert run("emerge", *folders, "--revisions", "a,b", "--tokens", "5,6") == 2
    assert "one model" in capsys.readouterr().err


def test_checkpoints_without_steps_are_drawn_in_order(tmp_path) -> None:
    models = [tiny_model("llama", seed) for seed in (0, 1)]
    found = emergence(zip(("early", "late"), models, strict=True), CASES, rotations=3)
    with matplotlib_untouched():
        labels = [t.get_text() for t in found.plot().axes[0].get_xticklabels()]
        assert len(plot_early_and_late(found, [0, 2]).axes) == 6
        plot_decomposition(decompose(models[0].record(list(IDS)), CASES[0].firing), tmp_path / "firing.png")
    assert labels == ["early", "late"]
