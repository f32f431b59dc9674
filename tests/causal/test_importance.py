"""What matters in a prompt: measured by runs, of equal length, the same for the same seed; the noun comes first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.tracing.measured_replacements import Measured
from headtrace.tracing.prompt_words import ask, rival, words_of
from tests.tiny import tiny_model

MARY = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def matters(model: headtrace.Model) -> headtrace.Importance:
    return headtrace.importance(model, MARY, budget=60)


def test_the_answer_and_its_rival_are_found(model: headtrace.Model) -> None:
    """The model's own answer; the rival is the word of the prompt among the likeliest, not the second token."""
    asked = ask(model, MARY)
    assert asked.root.question() == '"Mary" rather than "John"'
    logits = model.end_logits([asked.ids])[0].clone()
    logits[model.token_id(" drink")] = logits.max() - 1e-3
    assert rival(model, asked.ids, logits, [model.token_id(" Mary")]) == (model.token_id(" drink"),)
    assert ask(model, MARY, answer=" John", wrong=" Mary").root.question() == '"John" rather than "Mary"'


def test_every_number_is_what_a_run_of_the_changed_prompt_gives(
    model: headtrace.Model, matters: headtrace.Importance
) -> None:
    answer, wrong = model.token_id(" Mary"), model.token_id(" John")
    clean = matters.measured.asked.ids
    ids = torch.tensor(clean)
    for change in matters.measured.changes[::7]:
        recording = model.record([list(change.ids)])
        logits = recording.last_logits()
        value = float(logits[answer] - logits[wrong])
        assert change.value == pytest.approx(value, abs=1e-3)
        assert change.effect == pytest.approx(matters.value - value, abs=1e-3)
        assert change.flips == (value <= 0)
        told = [
            float(run.logits[0, :-1].log_softmax(-1).gather(-1, run.token_ids[0, 1:, None]).sum())
            for run in (recording, model.record([clean]))
        ]
        assert change.naturalness == pytest.approx(told[0] - told[1], abs=1e-2)
        changed = (torch.tensor(change.ids) != ids).nonzero()[:, 0].tolist()
        assert set(changed) <= set(change.positions)
        assert len(change.ids) == len(clean)
        assert model.to_ids(change.text) == list(change.ids)


def test_words_are_ranked_by_what_is_lost_without_them(matters: headtrace.Importance) -> None:
    names = [word.text for word in matters.top(2)]
    assert names == ["Mary", "John"]
    best = matters.top(1)[0]
    effects = [change.effect for change in best.changes]
    assert best.mean == pytest.approx(sum(effects) / len(effects))
    assert (best.low, best.high) == (min(effects), max(effects))
    assert matters.by_token()[best.positions[0]] == best.mean
    assert matters.by_token()[0] is None, "the start token is no word"


def test_both_kinds_of_change_are_taken_for_a_counterfactual(matters: headtrace.Importance) -> None:
    """Exchanging the answer's word shows what is copied, exchanging the repeated one why it is found."""
    reasons = {change.reason for change in matters.counterfactuals}
    assert reasons == {"answer", "relation"}
    assert all(change.flips for change in matters.counterfactuals)


def test_the_same_seed_gives_the_same_changes(model: headtrace.Model, matters: headtrace.Importance) -> None:
    again = headtrace.importance(model, MARY, budget=60)
    assert again.to_dict() == matters.to_dict()
    other = headtrace.importance(model, MARY, budget=60, seed=1)
    assert [c.ids for c in other.measured.changes] != [c.ids for c in matters.measured.changes]


def test_the_budget_is_kept_and_a_prompt_without_a_flip_gets_the_strongest_changes(
    model: headtrace.Model,
) -> None:
    found = headtrace.importance(model, MARY, answer=" Mary", wrong=" store", budget=13)
    assert len(found.measured.changes) <= 13
    if not found.flips:
        effects = [abs(change.effect) for change in found.measured.changes]
        assert abs(found.counterfactuals[0].effect) == max(effects)
        assert "No change that was tried flips it" in found.summary()
    with pytest.raises(InputError, match="at least one changed prompt"):
        headtrace.importance(model, MARY, budget=0)


def test_results_show_themselves(matters: headtrace.Importance, tmp_path: object) -> None:
    folder = matters.save(str(tmp_path))
    data = json.loads((folder / "importance.json").read_text())
    assert data["words"][0]["text"] == "Mary"
    assert (folder / "importance.png").stat().st_size > 1000
    assert "most natural first (logit difference then):" in matters.summary()
    assert "'Mary'" in repr(matters)
    assert "<img" in matters._repr_html_()
    assert matters.frame().height == len(matters.words)
    assert matters.frame("changes").height == len(matters.measured.changes)


def test_a_model_without_a_tokenizer_exchanges_tokens() -> None:
    model = tiny_model("gpt2")
    found = headtrace.importance(model, [5, 9, 11, 9, 3], budget=20)
    assert len(found.words) == 5
    assert all(len(change.ids) == 5 for change in found.measured.changes)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("prompt", "answer", "wrong", "noun"),
    [("The keys to the cabinet", " are", " is", "keys"), ("The key to the cabinets", " is", " are", "key")],
)
def test_the_noun_comes_first(
    smollm2: headtrace.Model, prompt: str, answer: str, wrong: str, noun: str
) -> None:
    """Content puts "The" first in both prompts; measured, it is the noun that decides."""
    found = headtrace.importance(smollm2, prompt, answer, wrong)
    assert found.top(1)[0].text == noun
    assert (noun, {"keys": "key", "key": "keys"}[noun]) in {(c.before, c.after) for c in found.flips}


@pytest.mark.smollm2
def test_words_of_several_tokens_are_exchanged_as_a_whole(smollm2: headtrace.Model) -> None:
    ids = smollm2.to_ids("The Eiffel Tower opened in 1889")
    assert [(w.text, len(w.positions)) for w in words_of(smollm2, ids) if len(w.positions) > 1] == [
        ("Eiffel", 2),
        ("1889", 4),
    ]


def test_the_command_writes_its_folder(tmp_path: Path) -> None:
    line = ["matters", "builtin", "-p", MARY, "--budget", "20", "--out", str(tmp_path / "m")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert {file.name for file in (tmp_path / "m").iterdir()} == {"importance.json", "importance.png"}
    written = json.loads((tmp_path / "m" / "importance.json").read_text())
    assert written["schema"] == "headtrace.importance/1"


def test_the_command_writes_its_words_as_a_latex_table(tmp_path: Path) -> None:
    out = tmp_path / "words.tex"
    done = CliRunner().invoke(app, ["matters", "builtin", "-p", MARY, "--budget", "20", "--out", str(out)])
    assert done.exit_code == 0, done.output
    written = out.read_text()
    assert written.startswith(r"\begin{tabular}")
    assert "Mary & 2 &" in written


# -- what is compared with -----------------------------------------------------------------------------------


def test_the_rival_of_a_word_is_a_word(model: headtrace.Model) -> None:
    """A full stop is no rival of *Mary*, though it be likelier than any other word."""
    asked = ask(model, MARY)
    logits = torch.full_like(model.end_logits([asked.ids])[0], -10.0)
    mary, stop, other = (model.token_id(token) for token in (" Mary", ".", " Anna"))
    logits[mary], logits[stop], logits[other] = 5.0, 4.0, 3.0
    assert rival(model, asked.ids, logits, [mary]) == (other,)
    logits[other] = -11.0
    logits[[model.token_id(token) for token in (" the", " a", " to", " in", " of")]] = -12.0
    assert rival(model, asked.ids, logits, [stop]) == (mary,), "for a symbol, the likeliest token"


def told(measured: Measured, *changes: tuple[str, str, float, float]) -> Measured:
    """The same prompt with other changes: the word, what is put in its place, the metric then, and how natural."""
    words = {word.text: word for word in measured.words}
    made = [
        replace(
            measured.changes[0],
            positions=words[before].positions,
            before=before,
            after=after,
            text=f"{before} {after}",
            reason="other",
            value=value,
            effect=measured.value - value,
            flips=value < 0,
            naturalness=natural,
        )
        for before, after, value, natural in changes
    ]
    return replace(measured, changes=tuple(made))


def test_a_function_word_takes_the_place_of_a_content_word_only_if_nothing_else_flips(
    matters: headtrace.Importance,
) -> None:
    both = told(matters.measured, ("Mary", "is", -5.0, 3.0), ("Mary", "Anna", -1.0, -2.0))
    assert [change.after for change in both.counterfactuals()] == ["Anna"]
    alone = told(matters.measured, ("Mary", "is", -5.0, 3.0), ("store", "park", 6.0, 2.0))
    assert [change.after for change in alone.counterfactuals()] == ["is"]


def test_flips_that_are_much_less_natural_than_the_best_are_left_out(matters: headtrace.Importance) -> None:
    some = told(
        matters.measured,
        ("Mary", "Anna", -1.0, 0.0),
        ("store", "park", -1.0, -9.0),
        ("drink", "MATLAB", -9.0, -11.0),
    )
    assert {change.after for change in some.counterfactuals()} == {"Anna", "park"}


def test_without_a_flip_the_changes_that_come_closest_are_taken(matters: headtrace.Importance) -> None:
    none = told(
        matters.measured,
        ("Mary", "Anna", 4.0, 0.0),
        ("store", "park", 30.0, 0.0),
        ("drink", "book", 5.0, 0.0),
    )
    assert none.weakens
    assert [change.after for change in none.counterfactuals()] == ["Anna", "book"]
    worse = told(matters.measured, ("Mary", "Anna", 9.0, 0.0), ("store", "park", 30.0, 0.0))
    assert not worse.weakens
    assert [change.after for change in worse.counterfactuals()] == ["park", "Anna"]


def test_of_equal_words_it_is_said_which_is_exchanged(matters: headtrace.Importance) -> None:
    said = {
        (change.before, change.which, change.positions): str(change) for change in matters.measured.changes
    }
    assert {which for before, which, _ in said if before == "John"} == {1, 2}
    for (before, which, _), text in said.items():
        assert text.startswith(
            {0: f"{before!r} -> ", 1: f"first {before!r} -> ", 2: f"second {before!r} -> "}[which]
        )
