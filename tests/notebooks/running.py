"""How a notebook is run, and what of it is kept.

A notebook has one cell tagged ``parameters``. What it sets is for readers; tests set less, right after it, so that a
notebook that takes minutes is run in seconds. A cell tagged ``page`` shows a circuit page, which would be most of the
file: its output is not kept.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

QUICK: dict[str, dict[str, Any]] = {
    "tour": {},
    "ioi": {"MODEL": "builtin", "PROMPTS": 1, "BASELINES": ("random",)},
    "families": {"PER_CELL": 1, "ABLATED": 2, "LARGER": "builtin"},
    "your-own-model": {"STEPS": 100, "SEEDS": (0,), "QUESTIONS": 10},
    "toy": {"STEPS": 1_000, "SEEDS": (0, 1)},
}
"""What tests put in the place of the parameters."""

METADATA: dict[str, Any] = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""All that a notebook says about what it was run with."""

_BADGE = re.compile(r"(?<=colab-badge\.svg\)\]\()[^)]*")


def read(name: str) -> Any:
    """A notebook by its name."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def tagged(notebook: Any, tag: str) -> list[Any]:
    """The cells that have a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def parameters(notebook: Any) -> dict[str, Any]:
    """The names that the cell of parameters sets, with their values."""
    lines = [line for cell in tagged(notebook, "parameters") for line in ast.parse(cell.source).body]
    return {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in lines}  # type: ignore[attr-defined]


def with_parameters(notebook: Any, given: dict[str, Any]) -> Any:
    """The notebook with other values after its own parameters."""
    unknown = set(given) - set(parameters(notebook))
    assert not unknown, f"{unknown} are no parameters of the notebook"
    for cell in tagged(notebook, "parameters"):
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in given.items())
    return notebook


def run(notebook: Any, folder: Path, kernel: Any = None) -> Any:
    """Run every cell in a folder; a cell that raises is an error.

    Without a kernel, in a fresh one. In a kernel that ran another notebook before (`kernel_manager`) its names are
    forgotten first; what it imported stays, which saves most of the time of a quick run.
    """
    if kernel is not None:
        notebook.cells.insert(0, new_code_cell(f"%reset -f\nimport os\nos.chdir({str(folder)!r})\ndel os"))  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    done = client.execute()
    if kernel is not None:
        del done.cells[0]
    return done


def kernel_manager() -> Any:
    """A kernel for several notebooks, one after another. It starts with the first; shut it down after the last."""
    return NotebookClient(new_notebook(), kernel_name="python3").create_kernel_manager()  # type: ignore[no-untyped-call]


def kept(notebook: Any, name: str) -> Any:
    """What of a notebook that was run is kept in the repository."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in ("tags",) if key in cell.metadata}
        )
        # What goes to standard error is about the machine: warnings with its paths, bars of progress.
        told = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
        if cell.cell_type == "code":
            cell.outputs = [] if "page" in cell.metadata.get("tags", ()) else _joined(told)
    title = notebook.cells[0]
    title.source = _BADGE.sub(badge(name), title.source)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs in which text that came in pieces, at whatever moments, is one piece."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def badge(name: str) -> str:
    """Where the badge leads: to the notebook, if the project says where its repository is; else to Colab's door."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "https://github\.com/([^"]+?)/?"$', project, re.MULTILINE)
    colab = "https://colab.research.google.com/"
    return f"{colab}github/{repository[1]}/blob/main/docs/notebooks/{name}.ipynb" if repository else colab
