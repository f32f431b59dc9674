"""Run notebooks with their own parameters and keep what they show: ``python -m tests.notebooks.refresh [NAME ...]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat

from tests.notebooks.running import FOLDER, NAMES, kept, read, run


def refresh(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = kept(run(read(name), Path(folder)), name)
    nbformat.write(done, FOLDER / f"{name}.ipynb")  # type: ignore[no-untyped-call]
    print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size:,} bytes")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        refresh(each)
