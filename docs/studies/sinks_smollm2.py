"""The study: sinks of SmolLM2-135M on prompts of four tasks. Writes tables, figures and sinks.json.

    python docs/studies/sinks_smollm2.py --out build/sinks

Takes about ten minutes on one core. Figures can be drawn again from the tables with --redraw.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import headtrace
from headtrace.sinks.result import FIGURES
from headtrace.tasks import TASKS, load_task

MODEL, PROMPTS = "smollm2-135m", 25
"""Prompts of each task."""


def measure(out: Path) -> headtrace.Sinks:
    model = headtrace.load(MODEL)
    sets = [load_task(task, model.tokenizer).spread(PROMPTS) for task in TASKS]
    begun = told = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{done} of {of} after {told - begun:.0f} s", flush=True)

    found = headtrace.find_sinks(model, sets, progress=progress)
    found.save(out)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/sinks"))
    parser.add_argument("--redraw", action="store_true", help="draw the figures from an earlier run's tables")
    options = parser.parse_args()
    if options.redraw:
        found = headtrace.load_sinks(options.out)
        for name in FIGURES:
            found.plot(name, options.out / f"sinks-{name}.png")
    else:
        found = measure(options.out)
    print(found.summary())


if __name__ == "__main__":
    main()
