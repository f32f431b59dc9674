"""Notebooks run from top to bottom without the names of others, and what is kept of them is small and of no machine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.models.test_gguf import small, write
from tests.notebooks.running import (
    FOLDER,
    METADATA,
    NAMES,
    QUICK,
    badge,
    kept,
    kernel_manager,
    parameters,
    read,
    run,
    tagged,
    with_parameters,
)

LARGEST, LARGEST_FIGURE = 300_000, 60_000
"""Bytes of a notebook, and of a figure in it."""
MACHINE = re.compile(r"/(work|root|tmp|home|usr|Users)/|\b20\d\d-\d\d-\d\d|\b\d\d:\d\d:\d\d\b")
"""Paths and times."""

each_notebook = pytest.mark.parametrize("name", NAMES)


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all notebooks, with nobody's own settings."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        manager = kernel_manager()
        yield manager
        if manager.has_kernel:
            asyncio.run(manager.shutdown_kernel(now=True))


@each_notebook
def test_every_cell_runs_with_quick_parameters(name: str, tmp_path: Path, kernel: Any) -> None:
    done = kept(run(with_parameters(read(name), QUICK[name]), tmp_path, kernel), name)
    shown, stored = _shown(done), _shown(read(name))
    assert shown == stored, "cells show something else than in the file: python -m tests.notebooks.refresh"


def _shown(notebook: Any) -> dict[str, set[str]]:
    """What cells show, by their ids: text, tables, figures."""
    return {
        cell.id: {kind for output in cell.outputs for kind in output.get("data", {"text": ""})}
        for cell in _code(notebook)
    }


def test_one_line_is_shown_while_a_file_is_read(tmp_path: Path, kernel: Any) -> None:
    file, cache = write(tmp_path / "small.gguf", small()), tmp_path / "cache"
    code = f"import os, headtrace\nos.environ['HEADTRACE_CACHE'] = {str(cache)!r}\n"
    cell = new_code_cell(f"{code}_ = headtrace.load({str(file)!r})")  # type: ignore[no-untyped-call]
    run(new_notebook(cells=[cell]), tmp_path, kernel)  # type: ignore[no-untyped-call]
    assert {output.get("name") for output in cell.outputs} == {"stderr"}
    assert "Reading small.gguf once" in "".join(output.text for output in cell.outputs)


def test_every_notebook_is_run_quickly() -> None:
    assert sorted(QUICK) == NAMES == ["families", "ioi", "tour", "toy", "your-own-model"]


@each_notebook
def test_outputs_are_stored_and_small(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST
    notebook = read(name)
    nbformat.validate(notebook)
    quiet = {"setup", "parameters", "page"}
    told = [cell for cell in _code(notebook) if cell.outputs]
    assert len(told) > 4
    assert [cell.execution_count for cell in _code(notebook)] == list(range(1, len(_code(notebook)) + 1))
    figures = [o.data["image/png"] for cell in told for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(figures) <= 2
    assert all(len(figure) * 3 / 4 < LARGEST_FIGURE for figure in figures)
    assert not [cell for cell in told if quiet & {cell.id, *cell.metadata.get("tags", ())}]


@each_notebook
def test_nothing_in_a_notebook_is_of_a_machine(name: str) -> None:
    notebook = read(name)
    assert notebook.metadata == METADATA
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    assert not MACHINE.findall(json.dumps(_without_pictures(notebook)))
    assert not [o for cell in _code(notebook) for o in cell.outputs if o.get("name") == "stderr"]


def _without_pictures(notebook: Any) -> Any:
    for cell in _code(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
    return notebook


@each_notebook
def test_a_notebook_begins_with_title_badge_and_install_by_name(name: str) -> None:
    title, setup = read(name).cells[:2]
    assert re.match(r"# .+\n\n.+[.?]\n\n\[!\[Open in Colab\]", title.source)
    assert f"({badge(name)})" in title.source
    assert re.search(
        r'find_spec\("headtrace"\) is None.*\n    %pip install --quiet headtrace-\*\.whl', setup.source, re.M
    )


@each_notebook
def test_a_notebook_says_what_it_does_not_show(name: str) -> None:
    assert read(name).cells[-1].source.startswith("## What this does not show\n\n- ")


@each_notebook
def test_links_of_a_notebook_lead_somewhere(name: str) -> None:
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://colab.") or (FOLDER / link).resolve().is_file(), link


@each_notebook
def test_parameters_of_tests_are_smaller_than_those_of_readers(name: str) -> None:
    notebook = read(name)
    own = parameters(notebook)
    assert set(QUICK[name]) == set(own)
    assert len(tagged(notebook, "parameters")) == (1 if own else 0)
    for parameter, value in QUICK[name].items():
        assert value == "builtin" if isinstance(value, str) else value < own[parameter]
