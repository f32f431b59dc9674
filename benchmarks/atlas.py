"""Cost of scoring a thousand signals over a corpus, in forward passes, all in one run; and the memory at two lengths.

Times are those of the processor: what else the machine does is not counted.

python benchmarks/atlas.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import headtrace
from headtrace.interpret import ScoredSignal, open_corpus, scan
from headtrace.interpret.corpus import Corpus

ROOT = Path(__file__).parent.parent


def text(folder: Path) -> Path:
    """The documentation of this repository as one text."""
    path = folder / "headtrace-benchmark-corpus.txt"
    pages = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    path.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    return path


def forward(model: headtrace.Model, corpus: Corpus, *, logits: bool) -> float:
    """Processor seconds of plain forward passes over a corpus, in the same batches; with all output logits or not."""
    chunks, spent = corpus.chunks(), 0.0
    while batch := list(islice(chunks, 2048 // corpus.length)):
        size = min(len(chunk.token_ids) for chunk in batch)
        ids = torch.tensor([chunk.token_ids[:size] for chunk in batch])
        start = time.process_time()
        with torch.inference_mode():
            model.hf(ids, use_cache=False, logits_to_keep=0 if logits else 1)
        spent += time.process_time() - start
    return spent


def channels(model: headtrace.Model, count: int) -> list[ScoredSignal]:
    """As many channels as asked for, spread over all heads."""
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    places = [(*head, channel) for channel in range(model.d_head) for head in heads][:count]
    return [ScoredSignal(f"L{l}H{h}:{c}", l, h, "channel", (c,)) for l, h, c in places]


def peak() -> float:
    """Gigabytes of memory that the process has taken at most, up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(model: headtrace.Model, source: str, tokens: int, count: int) -> dict[str, Any]:
    """A scan of a quarter of the corpus, which warms everything up and whose memory is noted; then of all of it."""
    signals, corpus = channels(model, count), open_corpus(source, model, tokens=tokens)
    quarter = scan(model, open_corpus(source, model, tokens=tokens // 4), signals)
    before = peak()
    start = time.process_time()
    found = scan(model, corpus, signals)
    spent, after = time.process_time() - start, peak()
    plain, last = (forward(model, corpus, logits=logits) for logits in (True, False))
    kept = sum(array.nbytes for array in vars(found.tally).values())
    return {
        "signals": len(signals),
        "tokens": found.n_tokens,
        "seconds of processor": round(spent, 1),
        "ratio to forward passes": round(spent / plain, 2),
        "ratio to forward passes without output logits": round(spent / last, 2),
        "MB kept": round(kept / 1e6, 1),
        f"peak GB after {quarter.n_tokens} tokens": round(before, 3),
        f"peak GB after {found.n_tokens} tokens": round(after, 3),
        "required": {"ratio to forward passes": 3},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="4,000 tokens; in full 20,000")
    options = parser.parse_args()
    model = headtrace.load(options.model)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(model, str(text(Path(folder))), 4_000 if options.quick else 20_000, 1000)
    print(json.dumps({"benchmark": "atlas", "model": options.model, **found}, indent=1))


if __name__ == "__main__":
    main()
