"""The built-in model is what its script makes, fits its size, and does what its page says."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.studies.builtin_model.text import MIX, documents, held_out_ioi, held_out_partners
from docs.studies.builtin_model.tokenizer import TOKEN, make_tokenizer
from docs.studies.builtin_model.train import Recipe, new_model, train, training_batches
from transformers import AutoTokenizer

from headtrace import builtin
from headtrace.tasks import accuracy, score_heads
from headtrace.tasks.words import NAMES, OBJECTS

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
PAGE = Path(__file__).parents[2] / "docs" / "findings" / "builtin.md"


def test_shipped_weights_have_the_published_hash() -> None:
    weights = (builtin.folder() / "model.safetensors").read_bytes()
    assert sha256(weights).hexdigest() in PAGE.read_text(encoding="utf-8")


def test_fits_in_four_megabytes() -> None:
    assert sum((builtin.folder() / name).stat().st_size for name in FILES) <= 4_000_000


@pytest.fixture(scope="module")
def held_out_result(builtin_model: Any, builtin_tokenizer: Any) -> Any:
    return held_out_ioi(builtin_tokenizer, n_per_cell=10, seed=1), builtin_model


@pytest.mark.parametrize("order", ["ABBA", "BABA"])
def test_held_out_ioi_first_choice_is_right_in_both_orders(held_out_result: Any, order: str) -> None:
    task_set, model = held_out_result
    result = accuracy(model, task_set.where(order=order))
    assert result.total == 150
    assert result.top1.value >= 0.95
    assert result.value >= 0.95


def test_held_out_prompts_are_made_of_words_that_never_met(builtin_tokenizer: Any) -> None:
    partners = held_out_partners()
    for example in held_out_ioi(builtin_tokenizer, n_per_cell=2):
        io, s = example.answer.strip(), example.wrong.strip()
        assert s in partners[io]
        for thing in set(example.text.replace(".", "").replace(",", "").split()) & set(OBJECTS):
            assert thing in partners[io]
            assert thing in partners[s]


def test_training_text_never_holds_a_held_out_pair() -> None:
    partners = held_out_partners()
    held = sum(map(len, partners.values())) / 2
    assert held == pytest.approx((len(NAMES) * len(OBJECTS) + len(NAMES) * (len(NAMES) - 1) / 2) / 5, rel=0.1)
    names_met: set[tuple[str, str]] = set()
    for document in islice(documents(0, re.compile(TOKEN).findall), 1500):
        named = [word for word in dict.fromkeys(document.words) if word in partners]
        for one, other in combinations(named, 2):
            assert other not in partners[one]
            names_met.add((one, other))
    assert len(names_met) > 1000


def test_training_text_has_every_kind_of_sentence() -> None:
    ends = {
        "ioi": " to ",
        "greater-than": " year ",
        "pronoun": " she ",
        "facts": " capital ",
        "name tag": " name ",
    }
    assert set(MIX) == set(ends)
    text = " ".join(" ".join(document.words) for document in islice(documents(0, str.split), 200))
    for kind, mark in ends.items():
        assert mark in text, kind


def test_shipped_tokenizer_is_the_one_that_the_script_makes(builtin_tokenizer: Any) -> None:
    made = make_tokenizer()
    assert builtin_tokenizer.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    "text",
    [
        "When Mary and John went to the store, John gave a drink to Mary.",
        "The war lasted from the year 1732 to the year 1745.",
        "So Mary is a very good teacher, isn't she. Then, he",
    ],
)
def test_decoding_gives_the_text_back(builtin_tokenizer: Any, text: str) -> None:
    assert builtin_tokenizer.decode(builtin_tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_a_name_is_one_token_with_or_without_a_space(builtin_tokenizer: Any) -> None:
    start, mary = builtin_tokenizer("Mary")["input_ids"]
    assert builtin_tokenizer(" Mary")["input_ids"] == [start, mary]
    assert start == builtin_tokenizer.bos_token_id
    assert builtin_tokenizer.decode([mary]) == "Mary"
    assert builtin_tokenizer("Xanadu")["input_ids"] == [start, builtin_tokenizer.unk_token_id]


def test_training_is_deterministic_and_saves_checkpoints(tmp_path: Path) -> None:
    recipe = replace(Recipe(), steps=17, batch_size=4, warmup=4)
    threads = torch.get_num_threads()
    try:
        for name in ("one", "two"):
            train(recipe, tmp_path / name, tmp_path / f"{name}-checkpoints")
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    # On one machine, one thread and torch's deterministic algorithms add up in the same order: no tolerance is needed.
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    steps = sorted(path.name for path in (tmp_path / "one-checkpoints").iterdir())
    assert steps == ["step-00000", "step-00016", "step-00017"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "one-checkpoints" / "step-00000")) == len(
        make_tokenizer()
    )


def test_shipped_configuration_is_the_recipe(builtin_model: Any) -> None:
    recipe = Recipe()
    fresh = new_model(recipe, make_tokenizer()).config
    for key in ("n_layer", "n_head", "n_embd", "n_inner", "n_positions", "vocab_size", "initializer_range"):
        assert getattr(builtin_model.hf.config, key) == getattr(fresh, key)


def test_batches_weigh_answers_most() -> None:
    ids, weights = next(training_batches(Recipe(), make_tokenizer()))
    assert ids.shape == weights.shape
    assert weights.unique().tolist() == pytest.approx([0.0, 0.1, 0.5, 3.0])


# The heads that the page lists, with what they must at least show.
HEADS = {
    "previous": {"L0H1": 0.8},
    "induction": {"L1H0": 0.7, "L1H1": 0.7, "L1H2": 0.7, "L1H3": 0.7},
    "subject": {"L2H0": 0.9, "L2H1": 0.9, "L2H2": 0.9},
    "name_moving": {"L1H0": 0.45, "L1H1": 0.45, "L1H2": 0.45, "L1H3": 0.45},
}


@pytest.fixture(scope="module")
def head_scores(builtin_model: Any) -> Any:
    return score_heads(builtin_model)


@pytest.mark.parametrize("kind", list(HEADS))
def test_has_the_heads_that_its_page_lists(head_scores: Any, kind: str) -> None:
    best = head_scores.top(kind, len(HEADS[kind]))
    assert {f"L{each.layer}H{each.head}" for each in best} == set(HEADS[kind])
    for each in best:
        assert each.score > HEADS[kind][f"L{each.layer}H{each.head}"]
