"""What stands around a call, or is given to it, and cannot work: one line says what it is and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headtrace
from headtrace.errors import HeadtraceError, InputError, UnsupportedModelError
from headtrace.tracing.attribute_root import attribute_root
from tests.tiny import prompts, tiny_hf, tiny_model, top_two

IDS = prompts()[0]


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    return tiny_model("llama")


def one_line(error: pytest.ExceptionInfo[BaseException]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.ill_typed
def test_autocast_is_refused_wherever_it_would_change_numbers(model: headtrace.Model) -> None:
    answers = top_two(model, IDS)
    circuit = headtrace.Tracer(model).trace(IDS, *answers)
    acts = (
        lambda: headtrace.Tracer(model).trace(IDS, *answers),
        lambda: model.record(IDS),
        lambda: headtrace.verify(circuit, model),
        lambda: model.channels.singular_values,
        lambda: headtrace.load("builtin"),
    )
    for act in acts:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(InputError, match="autocast is on") as error,
        ):
            act()
        assert one_line(error)
    headtrace.verify(circuit, model, edges="none")


@pytest.mark.parametrize("how", ["default", "block"])
def test_a_default_device_without_numbers_is_refused(model: headtrace.Model, how: str) -> None:
    answers = top_two(model, IDS)
    for act in (lambda: headtrace.Tracer(model).trace(IDS, *answers), lambda: headtrace.load("builtin")):
        if how == "default":
            torch.set_default_device("meta")
        try:
            with (
                torch.device("meta" if how == "block" else torch.get_default_device()),
                pytest.raises(InputError, match="default device of PyTorch is 'meta'") as error,
            ):
                act()
        finally:
            torch.set_default_device(None)
        assert one_line(error)


def test_a_model_without_layers_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    hf = tiny_hf("llama", num_hidden_layers=0)
    hf.save_pretrained(tmp_path)
    for given in (hf, tmp_path):
        with pytest.raises(UnsupportedModelError, match="has no layers") as error:
            headtrace.load(given)
        assert one_line(error)


@pytest.mark.ill_typed
@pytest.mark.parametrize("steps", [1.5, 0, "8", True])
def test_steps_that_are_no_whole_number_are_refused(model: headtrace.Model, steps: object) -> None:
    with pytest.raises(InputError, match="ig_steps="):
        headtrace.Tracer(model, ig_steps=steps)
    if steps is not True:
        root = headtrace.Tracer(model).trace(IDS, top_k=1).root
        with pytest.raises(InputError, match="ig_steps="):
            attribute_root(root, model.record(IDS), 0, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["half", None, float("nan"), [0.5]])
def test_a_function_for_tau_gives_numbers(model: headtrace.Model, value: object) -> None:
    tracer = headtrace.Tracer(model, tau=lambda visible_keys: value)
    with pytest.raises(InputError, match=r"tau\(\d+\) is") as error:
        tracer.trace(IDS, *top_two(model, IDS))
    assert one_line(error)


@pytest.mark.ill_typed
@pytest.mark.parametrize("edges", [0, None, 1.5, ["L1H0"]])
def test_edges_to_verify_are_words_or_edges(model: headtrace.Model, edges: object) -> None:
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    with pytest.raises(HeadtraceError, match="edges="):
        headtrace.verify(circuit, model, edges=edges)  # type: ignore[arg-type]


def test_a_run_is_not_resumed_under_another_function_for_tau(model: headtrace.Model, tmp_path: Path) -> None:
    lines = [{"tokens": ids, "answer": 5, "wrong": 7} for ids in prompts(lengths=(5, 6, 9))]

    def low(visible_keys: int) -> float:
        return 0.01 if visible_keys < 9 else 0.6

    headtrace.run(model, lines, out=tmp_path, root="linear", tau=low)
    headtrace.run(model, lines, out=tmp_path, root="linear", tau=lambda n: 0.01 if n < 9 else 0.6)
    for other in (lambda n: 0.6, lambda n: 0.01):
        with pytest.raises(InputError, match=r"another run: options\.thresholds.*given as tau"):
            headtrace.run(model, lines, out=tmp_path, root="linear", tau=other)
