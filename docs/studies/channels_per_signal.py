"""How many channels does a signal use? Traces IOI prompts and draws the distribution.

python docs/studies/channels_per_signal.py          # writes docs/figures/tracing-channels-per-signal.png
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import headtrace
from headtrace.figures.style import BLUE, VERMILION, house_style, new_figure, save
from headtrace.tasks import load_task

FIGURE = Path(__file__).parents[1] / "figures" / "tracing-channels-per-signal.png"
PROMPTS = {"smollm2-135m": 60, "builtin": 120}


def sizes(name: str, n: int) -> list[int]:
    """Channels of every signal on the query and key sides of the circuits of n IOI prompts."""
    model = headtrace.load(name)
    examples = load_task("ioi", model.tokenizer, n_per_cell=-(-n // 30), seed=3).examples[:n]
    circuits = headtrace.Tracer(model).trace_batch(examples, root="linear")
    return [len(e.channels or ()) for c in circuits for e in c.edges if e.side != "root"]


def main() -> None:
    with house_style():
        draw()


def draw() -> None:
    figure, (axes,) = new_figure(8, 3, 1, len(PROMPTS), sharey=True)
    findings: dict[str, dict[str, float]] = {}
    for axis, (name, n) in zip(axes, PROMPTS.items(), strict=True):
        found = sizes(name, n)
        counts = Counter(min(size, 10) for size in found)
        shares = [counts[k] / len(found) for k in range(1, 11)]
        axis.bar(range(1, 11), shares, color=BLUE)
        axis.axvline(statistics.median(found), color=VERMILION, linestyle="--", label="median")
        axis.set(
            title=f"{name}: {len(found):,} signals",
            xlabel="channels per signal (10: ten or more)",
            xticks=range(1, 11),
        )
        axis.legend(frameon=False)
        findings[name] = {
            "prompts": n,
            "signals": len(found),
            "median": statistics.median(found),
            "mean": round(statistics.fmean(found), 2),
            "share_of_one": round(found.count(1) / len(found), 3),
        }
    axes[0].set_ylabel("share of signals")
    save(figure, FIGURE)
    print(json.dumps(findings, indent=1))


if __name__ == "__main__":
    main()
