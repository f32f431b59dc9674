"""No false number passes, no true circuit fails: circuits of every method and root, changed in one place at a time.

``HEADTRACE_FUZZ=5000`` tries as many changes of each circuit instead of a few.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import headtrace
from headtrace.circuits.files import dumps, from_json, loads, to_json
from headtrace.errors import HeadtraceError
from tests.causal.traced_once import traced_once as traced_once
from tests.conftest import IOI
from tests.tiny import prompts, tiny_model, top_two

CHANGES = int(os.environ.get("HEADTRACE_FUZZ", "10"))
"""Changes of each circuit."""

METHODS: dict[str, dict[str, Any]] = {
    "acc++": {"method": "acc++"},
    "acc++ with a budget": {"method": "acc++", "max_firings": 3},
    "acc++ with a number as threshold": {"method": "acc++", "tau": 0.12, "ig_steps": 16},
    "acc": {"method": "acc"},
    "svt": {"method": "svt"},
}
ROOTS = ("linear", "single", "probability", "top_p", "continuation", "direction", "heads")


@cache
def model_of(name: str) -> headtrace.Model:
    return headtrace.load("builtin") if name == "builtin" else tiny_model(name)


@cache
def circuit_of(name: str, method: str, root: str) -> headtrace.Circuit:
    model = model_of(name)
    prompt = IOI if name == "builtin" else prompts()[0]
    ids = model.to_ids(prompt)
    answer, wrong = top_two(model, ids)
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(0))
    vector = vector * torch.sign(model.record(ids).residuals[2, 0, -1] @ vector)
    how: dict[str, Any] = {
        "linear": {"answer": answer, "wrong": wrong},
        "single": {"root": "linear", "answer": answer},
        "probability": {"answer": [answer, wrong]},
        "top_p": {"top_p": 0.6},
        "continuation": {"root": headtrace.circuits.Likelihood((answer, 9, answer), continuation=True)},
        "direction": {"direction": vector, "layer": 2},
        "heads": {"heads": ["L2H0", "L2H1"]},
    }[root]
    return headtrace.Tracer(model, **METHODS[method]).trace(prompt, **how)


CASES = [("builtin", method, root) for method in METHODS for root in ROOTS]
CASES += [(name, method, "linear") for name in ("llama", "qwen2", "gemma2") for method in METHODS]


def verdict(circuit: headtrace.Circuit, name: str) -> str:
    return headtrace.verify(circuit, model_of(name), edges="none").verdict


# -- changes -------------------------------------------------------------------------------------------------
# Each takes the data of a circuit file and changes one thing that the model contradicts by far more than the
# tolerance (1e-4 of attention, 1e-3 of logits on these models), or returns False where there is no such thing.

Change = Callable[[Any, random.Random], "bool | None"]
CHANGES_OF_A_FILE: list[Change] = []


def change(one: Change) -> Change:
    CHANGES_OF_A_FILE.append(one)
    return one


def moved(value: float, draw: random.Random, least: float = 5e-3) -> float:
    """A number beside the true one: by a little, by a lot, with the other sign, or none at all."""
    step = draw.choice([least, 10 * least, 0.5, 2.0]) * draw.uniform(1, 2)
    return draw.choice([value + step, value - step, -value - step, value + step])


def some(items: list[Any], draw: random.Random, *needs: str) -> Any:
    good = [item for item in items if all(item.get(key) is not None for key in needs)]
    return draw.choice(good) if good else None


def numeric(part: str, key: str, least: float = 5e-3) -> None:
    def edit(data: Any, draw: random.Random) -> bool | None:
        item = some(data[part], draw, key)
        if item is None:
            return False
        item[key] = moved(item[key], draw, least)
        return None

    edit.__name__ = f"{part} {key}"
    change(edit)


for _key in ("attention", "influence", "threshold"):
    numeric("nodes", _key)
numeric("edges", "weight", 3e-2)


@change
def predicted(data: Any, draw: random.Random) -> bool | None:
    node = some(data["nodes"], draw, "predicted")
    sides = [side for side, value in ((node or {}).get("predicted") or {}).items() if value is not None]
    if not sides:
        return False
    side = draw.choice(sides)
    node["predicted"][side] = moved(node["predicted"][side], draw)
    return None


@change
def elsewhere(data: Any, draw: random.Random) -> bool | None:
    node = some(data["nodes"], draw, "elsewhere")
    if node is None:
        return False
    signal = draw.choice(node["elsewhere"])
    signal["weight"] = moved(signal["weight"], draw, 3e-2)
    return None


@change
def flag(data: Any, draw: random.Random) -> bool | None:
    heads = [node for node in data["nodes"] if node["kind"] == "head"]
    if not heads:
        return False
    node, key = draw.choice(heads), draw.choice(["expanded", "explained"])
    node[key] = not node[key]
    return None


@change
def root_number(data: Any, draw: random.Random) -> bool | None:
    key = draw.choice(["value", "bias", "position"])
    if data["root"].get(key) is None:
        return False
    if key == "position":
        data["root"][key] = draw.choice([p for p in range(4) if p != data["root"][key]])
    else:
        data["root"][key] = moved(data["root"][key], draw, 2e-2)
    return None


@change
def answer(data: Any, draw: random.Random) -> bool | None:
    """Another token than the one that was asked about."""
    root, key = data["root"], draw.choice(["answer", "wrong", "support", "answer_tokens"])
    if not root.get(key):
        return False
    place = draw.randrange(len(root[key]))
    root[key][place] = "something else" if key == "answer_tokens" else (root[key][place] + 5) % 50
    return None


@change
def token(data: Any, draw: random.Random) -> None:
    key = draw.choice(["token_ids", "tokens"])
    place = draw.randrange(len(data["prompt"][key]))
    old = data["prompt"][key][place]
    data["prompt"][key][place] = (old + 1) % 60 if key == "token_ids" else old + "?"


@change
def text(data: Any, draw: random.Random) -> bool | None:
    if not data["prompt"]["text"]:
        return False
    data["prompt"]["text"] = data["prompt"]["text"].replace("John", "Mary", 1)
    return None


@change
def method(data: Any, draw: random.Random) -> bool | None:
    info = data["method"]
    if not any(node.get("threshold") for node in data["nodes"]):
        return False
    info["tau"] = draw.choice([0.31, 0.9]) if isinstance(info["tau"], str) else info["tau"] + 0.05
    return None


@change
def budget(data: Any, draw: random.Random) -> bool | None:
    """Less than was followed, or more than was left out."""
    expanded = sum(node["expanded"] for node in data["nodes"])
    if data.get("influence_kept") is None or not expanded:
        return False
    if draw.random() < 0.5:
        data["method"]["settings"]["max_firings"] = expanded - 1
    else:
        data["influence_kept"] = data["influence_kept"] - draw.uniform(0.01, 0.5)
    return None


@change
def model(data: Any, draw: random.Random) -> None:
    key = draw.choice(["weights_sha256", "architecture"])
    data["model"][key] = "0" * 64 if key == "weights_sha256" else "another"


def _heavy(data: Any, draw: random.Random) -> Any:
    return some(
        [e for e in data["edges"] if e["side"] != "root" and abs(e["weight"]) > 0.05], draw, "channels"
    )


@change
def channels(data: Any, draw: random.Random) -> bool | None:
    """Other channels than those that carry the signal."""
    edge = _heavy(data, draw)
    if edge is None:
        return False
    every = range(32 if data["model"]["name"] == "builtin" else 8)
    free = [k for k in every if k not in edge["channels"]]
    edge["channels"] = sorted(draw.sample(free, min(len(free), draw.randint(0, 3))))
    return None


@change
def fewer_channels(data: Any, draw: random.Random) -> bool | None:
    edge = _heavy(data, draw)
    if edge is None:
        return False
    edge["channels"] = draw.choice([[], None])
    return None


@change
def endpoint(data: Any, draw: random.Random) -> bool | None:
    """Another source, another target, another side."""
    edge = _heavy(data, draw)
    if edge is None:
        return False
    what = draw.choice(["source", "target", "side"])
    if what == "side":
        edge["side"] = "key" if edge["side"] == "query" else "query"
    else:
        edge[what] = draw.choice([n["id"] for n in data["nodes"] if n["id"] not in (edge[what], 0)])
    return None


@change
def missing_edge(data: Any, draw: random.Random) -> bool | None:
    edge = _heavy(data, draw)
    if edge is None:
        return False
    data["edges"].remove(edge)
    return None


@change
def place(data: Any, draw: random.Random) -> bool | None:
    """A component somewhere else than it was."""
    edge = _heavy(data, draw)
    if edge is None:
        return False
    node = next(n for n in data["nodes"] if n["id"] == edge["source"])
    key = draw.choice([k for k in ("layer", "head", "dest", "src") if node[k] is not None])
    node[key] = draw.choice([value for value in range(node[key] + 3) if value != node[key]])
    return None


# -- tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method", "root"), CASES)
def test_true_circuits_pass_as_they_are_and_from_files(name: str, method: str, root: str) -> None:
    circuit = circuit_of(name, method, root)
    predicts = any(
        node.predicted and any(v is not None for v in node.predicted.values()) for node in circuit.nodes
    )
    wanted = "PASS" if predicts else "NOTHING TO VERIFY"
    assert predicts == (not method.startswith("svt") and bool(circuit.edges))
    assert verdict(circuit, name) == wanted
    assert verdict(loads(dumps(circuit)), name) == wanted
    assert verdict(from_json(as_first_version(circuit)), name) == wanted


def as_first_version(circuit: headtrace.Circuit) -> dict[str, Any]:
    """The circuit as version 1 of the file had it."""
    data = json.loads(dumps(circuit)) | {"schema": "headtrace.circuit/1"}
    root = data["root"]
    if root["kind"] == "heads":
        data["root"] = {
            "kind": "linear",
            "answer": [],
            "wrong": None,
            "label": "attention of " + ", ".join(root["heads"]),
        }
        data["root"] |= {key: root[key] for key in ("value", "position")}
    elif not root.get("continuation"):  # which version 1 did not have
        bare = (
            "kind",
            "answer",
            "wrong",
            "value",
            "position",
            "layer",
            "support",
            "answer_tokens",
            "wrong_tokens",
        )
        data["root"] = {"answer": [], "wrong": None} | {key: root[key] for key in bare if key in root}
        if root.get("bias"):
            data["root"]["value"] -= root["bias"]
    return data


@pytest.mark.parametrize(("name", "method", "root"), CASES)
def test_a_false_circuit_never_passes(name: str, method: str, root: str) -> None:
    circuit = circuit_of(name, method, root)
    draw = random.Random(f"{name} {method} {root}")
    tried = 0
    while tried < CHANGES:
        data = json.loads(json.dumps(to_json(circuit)))
        before = json.dumps(data)
        edit = CHANGES_OF_A_FILE[draw.randrange(len(CHANGES_OF_A_FILE))]
        if edit(data, draw) is False or json.dumps(data) == before:
            tried += 0 if circuit.edges else 1  # an empty circuit has few places to change
            continue
        tried += 1
        try:
            changed = from_json(data)
            found = headtrace.verify(changed, model_of(name), edges="none")
        except HeadtraceError:
            continue  # refused: not a circuit of this model at all
        difference = [
            (a, b) for a, b in zip(_lines(before), _lines(json.dumps(data)), strict=False) if a != b
        ][:1]
        assert found.verdict == "FAIL", (edit.__name__, difference)
        assert all(str(failure) for failure in found.failures)


def _lines(text: str) -> list[str]:
    return text.replace("}, {", "}\n{").replace('", "', '"\n"').split("\n")
