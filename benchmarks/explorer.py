"""What the explorer's server computes for a click and for a prompt, in forward passes, in one run. Prints JSON.

Work is measured where it is done: requests in, answers as bytes out, without the way through the network. Times are
those of the processor: what else the machine does is not counted.

python benchmarks/explorer.py [--model smollm2-135m] [--tokens 128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import headtrace
from headtrace.explorer.panels import Session, Settings
from headtrace.explorer.panels.mechanisms import MechanismView, QuestionRequest, explain
from headtrace.explorer.panels.prompts import pattern_bytes, record
from headtrace.explorer.panels.requests import FiringRequest, PromptRequest
from headtrace.explorer.panels.session import Recordings
from headtrace.explorer.panels.why import WhyRequest, why
from headtrace.explorer.server.routes import as_sent

ROOT = Path(__file__).parent.parent
ROUNDS, FEW = 9, 3


def ratio(work: Callable[[int], object], forward: Callable[[], object]) -> float:
    """Median of processor times, work over a forward pass, measured in turn."""
    work(-1), forward()
    found: list[float] = []
    for n in range(ROUNDS):
        start = time.process_time()
        forward()
        middle = time.process_time()
        work(n)
        found.append((time.process_time() - middle) / (middle - start))
    return round(statistics.median(found), 2)


def explained(session: Session, prompt: PromptRequest, forward: Callable[[], object]) -> dict[str, float]:
    """From a typed prompt to each part of its explanation, in forward passes: medians of processor times."""
    parts: dict[str, list[float]] = {}
    for _ in range(FEW):
        start = time.process_time()
        forward()
        one = time.process_time() - start
        session.recordings = Recordings(Settings.cached_bytes, Settings.cached_recordings)
        start = time.process_time()

        def partial(view: MechanismView, start: float = start, one: float = one) -> None:
            as_sent(view)
            parts.setdefault(view.stage, []).append((time.process_time() - start) / one)

        recorded = session.record(prompt)
        partial(explain(session, QuestionRequest(recording=recorded.id), partial=partial)[0])
    names = {
        "run": "typing to heads that matter, by this run",
        "heads": "typing to heads that matter, by flow",
        "cards": "typing to the mechanism's cards",
        "badges": "typing to its badges",
    }
    return {names[stage]: round(statistics.median(found), 1) for stage, found in parts.items()}


class Clicks:
    """Cells that a person might click: of every head where it attends most, the strongest ones first."""

    def __init__(self, session: Session, prompt: PromptRequest) -> None:
        self.session, self.recorded = session, session.record(prompt)
        found = sorted(self.recorded.recording.strongest_firings(), key=lambda each: -each[1])
        self.cells = [firing for firing, _ in found if firing.layer > 0][:: max(1, len(found) // 40)]

    def why(self, n: int, **root: int) -> bytes:
        f = self.cells[n % len(self.cells)]
        firing = FiringRequest(layer=f.layer, head=f.head, dest=f.dest, src=f.src)
        return as_sent(why(self.session, WhyRequest(recording=self.recorded.id, firing=firing, **root)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    model = headtrace.load(options.model)
    ids = model.to_ids((ROOT / "benchmarks" / "text.txt").read_text(encoding="utf-8"))[: options.tokens]
    model.channels.singular_values  # noqa: B018 (made once for a model, and kept)
    session, prompt = Session([model]), PromptRequest(tokens=ids)
    batch = torch.tensor([ids])

    def forward() -> object:
        with torch.inference_mode():
            return model.hf(batch, use_cache=False)

    def typed(_: int) -> None:
        session.recordings = Recordings(Settings.cached_bytes, Settings.cached_recordings)
        view = record(session, prompt)
        as_sent(view), pattern_bytes(session, view.id)

    clicks = Clicks(session, prompt)
    answer = clicks.recorded.recording.top_answers(1)[0][1]
    found = {
        "click to causes": ratio(clicks.why, forward),
        "click to causes and contribution to an answer": ratio(
            lambda n: clicks.why(n, answer=answer), forward
        ),
        "typing to attention maps": ratio(typed, forward),
    } | explained(session, prompt, forward)
    told = {"benchmark": "explorer", "model": options.model, "tokens": len(ids), "forward passes": found}
    told["required"] = {"click to causes": 1, "typing to attention maps": 2}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
