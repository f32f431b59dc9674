"""Many prompts, one circuit each: a run that can be killed at any moment and resumed, and is read back.

    run = headtrace.run(model, examples, out="runs/ioi")
    run = headtrace.open_run("runs/ioi")          # .prompts .nodes .edges .circuit(id) .circuits(filter) .status()

``plan.py`` puts prompts into shards, ``work.py`` traces one shard, ``engines.py`` goes through them in processes or on
Ray, ``running.py`` starts or resumes a run. ``store.py`` is the folder or bucket, and keeps a second run out
of it; ``manifest.py`` describes its files and their columns, ``reading.py`` reads a run. Names are imported on
first use: reading needs no torch.

``frames.py`` gives the circuits of any source as tables and names positions by their roles, ``merging.py`` merges them
into one ``Network`` (``network.py``) or into the trace network of the 2024 paper. ``references.py`` holds published
circuits (``references/``), and says how far a network agrees with one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headtrace.runs.merging import merge
    from headtrace.runs.network import Network, load_network
    from headtrace.runs.reading import Run, RunStatus, open_run
    from headtrace.runs.running import run

_HOME = {
    "Network": "network",
    "Run": "reading",
    "RunStatus": "reading",
    "load_network": "network",
    "merge": "merging",
    "open_run": "reading",
    "run": "running",
}

__all__ = ["Network", "Run", "RunStatus", "load_network", "merge", "open_run", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headtrace.runs' has no attribute {name!r}")
    return getattr(import_module(f"headtrace.runs.{_HOME[name]}"), name)
