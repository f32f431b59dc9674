"""The notebook of the toy lab runs with the library as it is."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "toy.ipynb"


def test_every_cell_of_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    mpl.use("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for source in code:
        # A tenth of the steps, as many snapshots.
        short = source.replace("10_000", "1_000").replace("250", "25")
        exec(compile(short, str(NOTEBOOK), "exec"), names)
    assert len(plt.get_fignums()) == 1
    plt.close("all")
    told = capsys.readouterr().out
    assert told.count("step ") == 11
    assert "Omega differs from the closed form" in told
