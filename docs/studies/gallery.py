"""The gallery of the documentation: six kinds of prompts as mechanisms, on any model.

python docs/studies/gallery.py --model smollm2-135m [--only ioi needle] [--no-measure]
python docs/studies/gallery.py --page

The first form writes a picture of each (docs/figures/gallery) and what it says (MODEL.json there), and fails where a
ledger does not close to a thousandth or more than seven steps are shown. The second writes docs/gallery.md.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import headtrace
from headtrace.errors import HeadtraceError
from headtrace.mechanism.drawing import natural_width

DOCS = Path(__file__).resolve().parents[1]
PICTURES = DOCS / "figures" / "gallery"
MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "gemma-3-270m": "Gemma 3 270M",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}
EARLIER = "*Not made again since the sentence claims only confirmed steps: these are the words of an earlier version.*"
NEEDLE = "The password of the {place} is {word}."
IOI = "When Mary and John went to the store, John gave a drink to"
ASKED = "The password of the garden gate is"


load = cache(headtrace.load)


class Shown(NamedTuple):
    """One prompt of the gallery. Without a counterfactual, natural ones are found."""

    title: str
    prompt: str
    answer: str | list[str] | None = None
    wrong: str | list[str] | None = None
    counterfactual: str | list[str] = "auto"
    by_hand: str | list[str] = "auto"
    """For --by-hand, where the search for natural ones takes too long."""


def random_words(seed: int = 0) -> str:
    """Six words in random order, twice, the last of them left out: what comes next can only be read off."""
    words = ["cup", "blue", "seven", "dog", "red", "river"]
    random.Random(seed).shuffle(words)
    return " ".join([*words, *words[:-1]]).capitalize()


def haystack(first: str, second: str, asked: str = ASKED) -> str:
    """A story of about 500 tokens, in which two passwords are mentioned, and then a question about one of them."""
    story = (DOCS.parent / "benchmarks" / "text.txt").read_text(encoding="utf-8").split()[:370]
    needles = {
        120: NEEDLE.format(place="garden gate", word=first),
        240: NEEDLE.format(place="kitchen door", word=second),
    }
    told = [part for place, word in enumerate(story) for part in (needles.get(place, ""), word) if part]
    return " ".join([*told, asked])


GALLERY = {
    "ioi": Shown(
        "Indirect object",
        IOI,
        by_hand=[IOI.replace("Mary", "Sarah"), IOI.replace(", John", ", Mary")],
    ),
    "fact": Shown("A fact", "The capital of France is", " Paris", " London", "The capital of England is"),
    "agreement": Shown(
        "Agreement", "The keys to the cabinet", " are", " is", by_hand="The key to the cabinet"
    ),
    "greater-than": Shown(
        "Greater than",
        "The war lasted from the year 1752 to the year 17",
        ["6", "7", "8", "9"],
        ["0", "1", "2", "3", "4"],
        "The war lasted from the year 1702 to the year 17",
    ),
    "induction": Shown(
        "A random sequence, repeated",
        random_words(),
        by_hand=[random_words().replace("dog", "green"), random_words().removesuffix("river") + "red"],
    ),
    "needle": Shown(
        "A needle in 500 tokens",
        haystack("orange", "purple"),
        " orange",
        " purple",
        [
            haystack("purple", "orange"),
            haystack("orange", "purple", ASKED.replace("garden gate", "kitchen door")),
        ],
    ),
}


def not_explained(found: headtrace.Mechanism) -> str:
    """What the mechanism leaves open, in one line."""
    share = dict.fromkeys(("mlps", "rest"), 0.0)
    steps = {step.id: step for step in found.steps}
    for line in found.ledger:
        step = None if line.step is None else steps[line.step]
        if step is None and line.text == "not shown":
            share["rest"] += line.amount / found.whole
        elif step is None or step.role == "mlps":
            share["mlps"] += line.amount / found.whole
    said = [f"{share['rest']:+.0%} comes from heads and tokens that are not shown"]
    if abs(share["mlps"]) >= 0.05:
        said.append(f"{share['mlps']:+.0%} from MLPs, and what they compute is left open")
    if found.test is not None:
        said.append(f"the shown heads alone keep {found.test.sufficiency:.0%} of the difference")
    return "; ".join(said) + "."


def explain(name: str, kind: str, measure: bool, by_hand: bool, kept: Path | None) -> headtrace.Mechanism:
    """One mechanism: of the model, or as it was kept."""
    file = None if kept is None else kept / f"{name}-{kind}.json"
    if file is not None and file.exists():
        return headtrace.load_mechanism(file)
    shown = GALLERY[kind]
    compared = shown.by_hand if by_hand and shown.counterfactual == "auto" else shown.counterfactual
    found = headtrace.why(load(name), shown.prompt, shown.answer, shown.wrong, compared, measure=measure)
    if file is not None:
        found.save(file)
    return found


def make(found: headtrace.Mechanism, name: str, kind: str) -> dict[str, Any]:
    """Draw one mechanism, and say what the page says of it."""
    ledger = sum(line.amount for line in found.ledger)
    assert abs(ledger - found.whole) <= 1e-3 * abs(found.whole), (kind, ledger, found.whole)
    compared = found.circuit.difference
    assert compared is not None
    assert abs(found.whole - (compared.value - compared.other_value)) <= 1e-3 * abs(found.whole)
    assert 0 < len(found.steps) <= 7, (kind, len(found.steps))
    picture = PICTURES / f"{name}-{kind}.svg"
    picture.write_text(found.to_svg(natural_width(found)) + "\n", encoding="utf-8")
    return {
        "tokens": len(found.circuit.prompt.tokens),
        "question": found.question,
        "verdict": found.verdict,
        "origin": found.origin,
        "chosen": list(found.chosen),
        "sentence": found.sentence,
        "ledger": found.ledger_text,
        "ledger_error": abs(ledger - found.whole) / abs(found.whole),
        "not_explained": not_explained(found),
        "steps": len(found.steps),
    }


def _length(tokens: int) -> str:
    return f" ({tokens} tokens)" if tokens >= 100 else ""


def page() -> str:
    """docs/gallery.md from what the models said."""
    told = {
        name: json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))
        for name in MODELS
        if (PICTURES / f"{name}.json").exists()
    }
    lines = [
        "# Gallery",
        "",
        "Six kinds of prompts on three models, each as [a mechanism](explanation/mechanisms.md): what the heads do, in "
        "at most seven steps made by rules "
        "([how to read the sentence](explanation/mechanisms.md#how-to-read-the-sentence)), with what was "
        "measured on each card (○ where nothing was; a dashed frame and struck numbers where the "
        "[measurement is no evidence](explanation/mechanisms.md#when-a-badge-is-no-evidence)). The lines of "
        "each ledger add up to the whole difference (asserted to a thousandth by the script that made this page, "
        "`docs/studies/gallery.py`). Prompts were not chosen by their results; what a mechanism leaves open "
        "stands below it. On the two smaller models the prompts to compare with were found by the model, except for "
        "the fact, the years and the needle; on Qwen all were written by hand (`--by-hand`). For "
        "the fact, answer and rival are given, too: Gemma's own answer is *the*.",
        "",
    ]
    for kind, shown in GALLERY.items():
        lines += [f"## {shown.title}", ""]
        text = shown.prompt if len(shown.prompt) < 200 else f"{shown.prompt[:80]} ... {ASKED}"
        lines += [f"> {text}", ""]
        for name, title in MODELS.items():
            said = told.get(name, {}).get(kind)
            lines += [f"### {shown.title}: {title}", ""]
            if said is None:
                lines += ["Not run.", ""]
                continue
            if "problem" in said:
                lines += [said["problem"], ""]
                continue
            picture = f"figures/gallery/{name}-{kind}.svg"
            lines += [
                f"**Why {said['question']}?** {said['sentence']}",
                "",
                f"![{said['question'].replace(chr(34), '')} on {title}, as cards over the prompt]({picture})",
                "",
                *([] if "verdict" in said else [EARLIER, ""]),
                f"- Compared{_length(said['tokens'])}: {said['origin']}.",
                f"- {said['ledger']}",
                *([f"- Measured: {said['verdict']}."] if "verdict" in said else []),
                f"- Not explained: {said['not_explained']}",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="*", choices=list(GALLERY), default=list(GALLERY))
    parser.add_argument("--no-measure", action="store_true", help="leave out the interventions")
    parser.add_argument(
        "--by-hand", action="store_true", help="compare with prompts by hand, without a search"
    )
    parser.add_argument(
        "--kept", type=Path, help="a folder that keeps mechanisms; one that is there is not made again"
    )
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    given = parser.parse_args()
    if given.page:
        (DOCS / "gallery.md").write_text(page(), encoding="utf-8")
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    if given.kept is not None:
        given.kept.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{given.model}.json"
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for kind in given.only:
        try:
            start = time.monotonic()
            found = explain(given.model, kind, not given.no_measure, given.by_hand, given.kept)
            told[kind] = make(found, given.model, kind)
            print(f"{kind}: {time.monotonic() - start:.0f} s", flush=True)
        except HeadtraceError as error:
            told[kind] = {"problem": str(error)}
        path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
