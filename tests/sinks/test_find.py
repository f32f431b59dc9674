"""From prompts to sinks, end to end: results, files, figures, and what users can get wrong."""

from __future__ import annotations

import json

import pytest
import torch

import headtrace
from headtrace.errors import InputError
from headtrace.sinks.find import find_sinks
from headtrace.sinks.result import FIGURES, save_sinks
from headtrace.tasks import load_task
from tests.figures.labels import missing_labels
from tests.figures.untouched import matplotlib_untouched
from tests.tiny import prompts, tiny_model


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def found(model):
    sets = [load_task(task, model.tokenizer).spread(6) for task in ("ioi", "facts")]
    told: list[int] = []
    result = find_sinks(model, sets, directions=(1, 2), progress=lambda done, of: told.append(done))
    assert told == sorted(told)
    assert told[-1] == 100
    return result


def test_the_built_in_model_has_sinks_with_signals_on_both_sides(found, model) -> None:
    assert found.settings.prompts == {"ioi": 6, "facts": 6}
    assert len(found.mass.filter(kind="sinks")) == model.n_layers * model.n_heads
    assert found.tokens.filter(kind="first")["occurrences"].to_list() == [12]
    assert set(found.constancy["side"]) == {"query", "key"}
    for side in ("query", "key"):
        cosines = found.cosines(side)
        heads = found.means[side].names
        assert cosines.columns == ["head", *heads]
        diagonal = [cosines[name][i] for i, name in enumerate(heads)]
        assert diagonal == pytest.approx([1.0] * len(heads), abs=1e-5)
        assert found.vectors(side).shape[1] == model.d_model
    assert found.removed("both", 0, "nothing", "sink mass") == pytest.approx(found.sink_mass, abs=1e-5)
    assert "Without 2 directions on both sides" in found.summary()
    assert len(repr(found)) < 150
    assert "<table>" in found._repr_html_()
    with pytest.raises(InputError, match="Nothing was measured"):
        found.removed("key", 99, "signals", "loss")


@pytest.mark.ill_typed
def test_there_are_two_sides_only(found) -> None:
    with pytest.raises(InputError, match="choose 'query' or 'key'"):
        found.cosines("value")


def test_prompts_that_are_all_the_same_have_constancy_one(model) -> None:
    text = "When Mary and John went to the store, John gave a drink to"
    same = find_sinks(model, {"a": [text, text], "b": [text]}, directions=())
    constancy = same.constancy.drop_nulls("constancy")
    assert len(constancy) > 4
    assert constancy["constancy"].to_list() == pytest.approx([1.0] * len(constancy), abs=1e-6)
    assert constancy["within"].to_list() == pytest.approx([1.0] * len(constancy), abs=1e-6)
    assert not len(same.collapse)
    with pytest.raises(InputError, match="no collapse to draw"):
        same.plot("collapse")


def test_a_folder_holds_everything_and_is_read_back(found, tmp_path) -> None:
    with matplotlib_untouched():
        folder = found.save(tmp_path / "sinks")
    written = {path.name for path in folder.iterdir()}
    assert {f"sinks-{name}.png" for name in FIGURES} <= written
    assert {"sinks.json", "mass.parquet", "cosines-query.parquet", "cosines-key.parquet"} <= written
    again = headtrace.load_sinks(folder)
    assert again.settings == found.settings
    assert again.to_dict() == found.to_dict()
    for name in ("mass", "constancy", "directions", "groups", "collapse", "tokens", "firings"):
        assert getattr(again, name).equals(getattr(found, name)), name
    for side in ("query", "key"):
        assert torch.equal(again.vectors(side), found.vectors(side))
        assert again.cosines(side).equals(found.cosines(side))
    assert json.loads((folder / "sinks.json").read_text())["schema"] == "headtrace.sinks/1"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_read_alone(found, name: str) -> None:
    figure = found.plot(name)
    assert not missing_labels(figure)
    assert found.model["name"] in figure.get_suptitle()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("sinks.json", b"{", "not JSON"),
        ("sinks.json", b"[]", "no JSON object"),
        ("sinks.json", b'{"schema": "headtrace.circuit/2"}', "headtrace.circuit/2"),
        ("sinks.json", b'{"schema": "headtrace.sinks/1"}', "damaged"),
        ("mass.parquet", b"PAR1", "mass.parquet"),
        ("signals.safetensors", b"", "signals.safetensors"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(found, tmp_path, file, content, said) -> None:
    folder = save_sinks(found, tmp_path / "sinks")
    (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=said):
        headtrace.load_sinks(folder)


def test_a_folder_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        headtrace.load_sinks(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        ([], {}, "no prompts"),
        (["When Mary and John went to"], {}, "at least two"),
        ([[5, 6, 7], [5]], {}, "has one token"),
        ([[5, 6, 7], [6, 7, 8]], {"threshold": 0}, "threshold=0"),
        ([[5, 6, 7], [6, 7, 8]], {"firings_per_head": 1}, "firings_per_head=1"),
        ([[5, 6, 7], [6, 7, 8]], {"directions": (0,)}, "at least 1"),
    ],
)
def test_what_cannot_be_studied_is_an_error_that_says_why(model, given, how, said) -> None:
    with pytest.raises(InputError, match=said):
        find_sinks(model, given, **how)


def test_heads_that_attend_too_little_are_an_error_that_says_so(model) -> None:
    with pytest.raises(InputError, match="No head"):
        find_sinks(model, [[5, 6], [6, 7]], tracer=headtrace.Tracer(model, tau=1.0))


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3", "gemma2", "olmo2"])
def test_models_without_a_tokenizer_and_of_any_kind_are_studied(name: str) -> None:
    model = tiny_model(name)
    tracer = headtrace.Tracer(model, tau=0.2)
    found = find_sinks(model, prompts(0, (11, 7, 9)), tracer=tracer, directions=(1,))
    assert found.settings.prompts == {"prompts": 3}
    assert found.settings.tau == "0.2"
    assert not len(found.collapse.filter(measure="logit difference")), "there are no answers"
    assert len(found.collapse.filter(measure="loss"))
