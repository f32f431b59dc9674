"""What heads say through the unembedding, on SmolLM2: is it what the model says because of them?

    python docs/studies/words_outputs.py [--model smollm2-135m] [--prompts 30] [--by-channel 8] [--out build/outputs]

On IOI prompts, heads that are known to copy the name or to lower the rival (docs/findings/structure.md), and heads that
are drawn at random. Each reads one token for the last one: what it raises and lowers by words (``head_says``) is
compared with what happens to the logits when that write is taken away. Controls: the words of the same head for another
token of the prompt, and those of another head of its layer for this token. Then the same for each of the eight
strongest channels of W_V W_O alone, and whether the tokens that a channel reads by the embedding are those that it
reads in the prompt. A prompt is some lines of rows.jsonl, written when it is done; the same command goes on with what
is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from sufficiency import RESAMPLES
from torch import Tensor

import headtrace
from headtrace.causal.changes import ComponentChange, GlobalEdit
from headtrace.causal.execute import rerun
from headtrace.interpret import check_head_says, head_says, output_channels
from headtrace.models import Recording
from headtrace.tasks import Example, load_task
from headtrace.vocabulary import Component, Site, head_name

COPIES, LOWERS = ((22, 4), (23, 0), (23, 1), (23, 2)), ((23, 3),)
"""Heads that read the name IO, and the one that reads S2: those of docs/findings/structure.md."""
LATE, DRAWN = 20, 3
"""Random heads are drawn from this layer on, and from those before it: so many of each for a prompt."""
LEAST = 0.1
"""Attention to the token that is read: with less there is nothing to take away."""
SHOWN, ENDS, CHANNELS = 10, 50, 8
"""Words of a list, tokens at each end for the AUROC, and channels of a head."""


def asked(recording: Recording, example: Example, number: int) -> Iterator[tuple[str, int, int, int]]:
    """Kind of head, layer, head and the token that it reads for the last one."""
    end, places = recording.lengths[0] - 1, example.roles
    patterns = recording.patterns[:, 0, :, end]
    known = [("copies", *head, places["IO"]) for head in COPIES]
    known += [("lowers", *head, places["S2"]) for head in LOWERS]
    random, named = Random(number), {*COPIES, *LOWERS}
    for kind, layers in (("random, late", range(LATE, 30)), ("random, early", range(LATE))):
        heads = [(layer, head) for layer in layers for head in range(recording.model.n_heads)]
        # The token other than the first one that it attends to most, if it does.
        most = {each: int(patterns[each][1:].argmax()) + 1 for each in heads if each not in named}
        firing = [each for each, src in most.items() if float(patterns[each][src]) >= LEAST]
        known += [(kind, *each, most[each]) for each in random.sample(firing, min(DRAWN, len(firing)))]
    for kind, layer, head, src in known:
        if float(patterns[layer, head, src]) >= LEAST:
            yield kind, layer, head, src


def through_unembedding(model: headtrace.Model, written: Tensor) -> Tensor:
    """What is added to every logit, but for the final norm's scale and a constant."""
    return readout(model) @ written


@cache
def readout(model: headtrace.Model) -> Tensor:
    return model.architecture.centred(model.weights.W_U * model.weights.final_gain)


@cache
def output_directions(model: headtrace.Model, layer: int, head: int) -> tuple[Tensor, Tensor]:
    """The singular vectors of W_V W_O: what it reads (columns), and what it writes (rows)."""
    value = model.weights.W_V[layer, head // model.weights.group]
    inputs, _, outputs = torch.linalg.svd(value @ model.weights.W_O[layer, head])
    return inputs, outputs


def agreement(predicted: Tensor, fell: Tensor, most: int = SHOWN) -> tuple[float, float]:
    """Of the tokens at both ends of a prediction: how many rose, and how many fell, against the mean of all."""
    raised, lowered = (side.topk(most).indices for side in (predicted, -predicted))
    rise = fell - fell.mean()
    return float((rise[raised] > 0).float().mean()), float((rise[lowered] < 0).float().mean())


def separation(predicted: Tensor, fell: Tensor) -> float:
    """AUROC: how well the tokens at both ends of a prediction are told apart by what happened to them."""
    up, down = (fell[side.topk(ENDS).indices] for side in (predicted, -predicted))
    return float(((up[:, None] > down).double() + 0.5 * (up[:, None] == down).double()).mean())


def whole(recording: Recording, layer: int, head: int, src: int, random: Random) -> dict[str, Any]:
    """What a head says, against the model without it."""
    model, end = recording.model, recording.lengths[0] - 1
    tested = check_head_says(recording, layer, head, end, src)
    changed = rerun(recording, [ComponentChange(Site("head", layer, head, dest=end, src=src))])
    fell = recording.logits_at(0, end) - changed.logits_at(0, end)
    other = random.choice([each for each in range(model.n_heads) if each != head])

    def says(which: int) -> Tensor:
        return through_unembedding(
            model, recording.bare_values[layer, which, 0, src] @ model.weights.W_O[layer, which]
        )

    words = head_says(recording, layer, head, src, most=SHOWN)
    raised, lowered = ([token for token, _ in side] for side in (words.raises, words.lowers))
    return {
        "auroc": tested.auroc,
        "holds": tested.holds,
        "another token": tested.control,
        "another head": separation(says(other), fell),
        "words": agreement(says(head), fell),
        "words of another head": agreement(says(other), fell),
        "reads": words.token,
        "raises": raised,
        "lowers": lowered,
        "raises what it reads": words.token in raised,
        "lowers what it reads": words.token in lowered,
        "logit of what it reads": float(fell[recording.token_ids[0, src]] - fell.mean()),
    }


def by_channel(recording: Recording, layer: int, head: int, src: int) -> list[dict[str, Any]]:
    """Each strong channel of W_V W_O: the part of the write along it is taken away."""
    model, end = recording.model, recording.lengths[0] - 1
    _, directions = output_directions(model, layer, head)
    attention = recording.patterns[layer, 0, head, end, src]
    written = attention * (recording.bare_values[layer, head, 0, src] @ model.weights.W_O[layer, head])
    found: list[dict[str, Any]] = []
    for channel in range(CHANNELS):
        part = (written @ directions[channel]) * directions[channel]
        edit = torch.zeros(recording.lengths[0], model.d_model)
        edit[end] = -part
        changed = rerun(recording, [GlobalEdit(Component("head", layer, head), edit)])
        fell = recording.logits_at(0, end) - changed.logits_at(0, end)
        predicted = through_unembedding(model, part)
        found.append(
            {
                "channel": channel,
                "share": float(part.norm() / written.norm()),
                "auroc": separation(predicted, fell),
                "words": agreement(predicted, fell),
            }
        )
    return found


def what_channels_read(model: headtrace.Model, recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Of each channel of the known heads: do the tokens that it reads by the embedding stand out in the prompts?"""
    embedding: Any = model.hf.get_input_embeddings()
    x = torch.nn.functional.rms_norm(embedding.weight.detach(), (model.d_model,))
    found: list[dict[str, Any]] = []
    for layer, head in (*COPIES, *LOWERS):
        inputs, directions = output_directions(model, layer, head)
        for channel, words in enumerate(output_channels(model, layer, head, channels=CHANNELS, most=SHOWN)):
            read = x @ inputs[:, channel]
            meant, was = list[float](), list[float]()
            for recording in recordings:
                written = recording.bare_values[layer, head, 0] @ model.weights.W_O[layer, head]
                was += (written @ directions[channel])[1 : recording.lengths[0]].tolist()
                meant += read[recording.token_ids[0, 1 : recording.lengths[0]]].tolist()
            found.append(
                {
                    "head": head_name(layer, head),
                    "channel": channel,
                    "correlation": float(np.corrcoef(meant, was)[0, 1]),
                    "reads": [token for token, _ in words.reads],
                    "raises": [token for token, _ in words.raises],
                    "lowers": [token for token, _ in words.lowers],
                }
            )
    return found


# -- the tables --------------------------------------------------------------------------------------------------


def mean_interval(rows: Sequence[Mapping[str, Any]], name: str, place: int | None = None) -> str:
    """The mean, and its 95 % interval from drawing prompts again: heads of one prompt go together."""
    prompts: dict[int, list[float]] = {}
    for row in rows:
        value = row[name] if place is None else row[name][place]
        if value is not None:
            prompts.setdefault(row["prompt"], []).append(float(value))
    sums = np.array([[sum(each), len(each)] for each in prompts.values()])
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return f"{sums[:, 0].sum() / sums[:, 1].sum():.2f} [{low:.2f}, {high:.2f}]"


def tables(rows: Sequence[Mapping[str, Any]], read: Sequence[Mapping[str, Any]]) -> str:
    heads = [head_name(*each) for each in (*COPIES, *LOWERS)]
    groups = {name: [row for row in rows if row["head"] == name] for name in heads}
    groups |= {
        kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in rows)
    }
    columns = (
        *(("AUROC", "auroc", None), ("another token", "another token", None)),
        *(("another head", "another head", None), ("holds", "holds", None)),
        *(("raised rose", "words", 0), ("lowered fell", "words", 1)),
        *(
            ("other head's raised rose", "words of another head", 0),
            ("its lowered fell", "words of another head", 1),
        ),
        *(
            ("raises what it reads", "raises what it reads", None),
            ("lowers it", "lowers what it reads", None),
        ),
        ("logit of it", "logit of what it reads", None),
    )
    lines = ["| heads | rows | " + " | ".join(name for name, _, _ in columns) + " |"]
    lines.append("| --- " * (2 + len(columns)) + "|")
    for name, some in groups.items():
        if some:
            cells = [mean_interval(some, key, place) for _, key, place in columns]
            lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + " |")
    lines += ["", "| channels of | rows | share of the write | AUROC | raised rose | lowered fell |"]
    lines.append("| --- " * 6 + "|")
    for name, some in groups.items():
        parts = [{"prompt": row["prompt"], **part} for row in some for part in row.get("channels", ())]
        if parts:
            cells = [mean_interval(parts, "share"), mean_interval(parts, "auroc")]
            cells += [mean_interval(parts, "words", place) for place in (0, 1)]
            lines.append(f"| {name} | {len(parts)} | " + " | ".join(cells) + " |")
    correlations = [each["correlation"] for each in read]
    low, middle, high = np.quantile(correlations, (0, 0.5, 1))
    lines += ["", f"What {len(read)} channels read, embedding against prompt: correlation {middle:.2f} (median; "
              f"{low:.2f} to {high:.2f})", ""]  # fmt: skip
    for each in read:
        said = ", ".join(f"{side} {each[side][:5]}" for side in ("reads", "raises", "lowers"))
        lines.append(f"- {each['head']} {each['channel']} ({each['correlation']:.2f}): {said}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument(
        "--by-channel", type=int, default=8, help="prompts whose channels are tested one by one"
    )
    parser.add_argument("--out", type=Path, default=Path("build/outputs"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model, file = headtrace.load(given.model), given.out / "rows.jsonl"
    rows: list[dict[str, Any]] = []
    if file.exists():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    per_cell = -(-given.prompts // 30)
    examples = load_task("ioi", model.tokenizer, n_per_cell=per_cell, seed=3).spread(given.prompts)
    recordings: list[Recording] = []
    with file.open("a", encoding="utf-8") as out:
        for number, example in enumerate(examples):
            recordings.append(model.record([example.token_ids], last_logits=1))
            if number in {row["prompt"] for row in rows}:
                continue
            random = Random(number)
            new: list[dict[str, Any]] = []
            for kind, layer, head, src in asked(recordings[-1], example, number):
                row: dict[str, Any] = {
                    "prompt": number,
                    "id": example.id,
                    "kind": kind,
                    "head": head_name(layer, head),
                }
                row |= whole(recordings[-1], layer, head, src, random)
                if number < given.by_channel and kind != "random, early":
                    row["channels"] = by_channel(recordings[-1], layer, head, src)
                new.append(row)
            rows += new
            out.write("".join(json.dumps(row) + "\n" for row in new))
            out.flush()
            print(example.id, [(row["head"], round(row["auroc"], 2)) for row in new], flush=True)
    found = tables(rows, what_channels_read(model, recordings))
    (given.out / "results.md").write_text(found, encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
