"""Damaged model folders, many of them: each is an error that a user can read, or exactly the model in the files.

Cases follow from a seed. ``HEADTRACE_FUZZ=10000`` runs as many of each kind, from another seed every time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headtrace
from headtrace.errors import HeadtraceError
from tests.tiny import tiny_hf

MORE = int(os.environ.get("HEADTRACE_FUZZ", "0"))
FAMILIES = ("gpt2", "llama", "gpt_neox", "gemma3_text", "qwen3")
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        7,
        33,
        10**9,
        10**18,
        10**40,
        0.5,
        -0.5,
        1e300,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "eager",
        "gelu",
        "llama",
        "../../etc",
        "float16",
        [],
        {},
        [1, 2],
        ["full_attention"] * 4,
        {"a": 1},
        [[]],
    ),
]
KEYS = [
    *(
        "model_type",
        "architectures",
        "auto_map",
        "quantization_config",
        "tie_word_embeddings",
        "dtype",
        "torch_dtype",
    ),
    *(
        "layer_types",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "sliding_window",
        "attn_implementation",
    ),
    *(
        "_attn_implementation",
        "transformers_weights",
        "num_labels",
        "pad_token_id",
        "head_dim",
        "num_key_value_heads",
    ),
    *(
        "hidden_size",
        "num_hidden_layers",
        "n_layer",
        "vocab_size",
        "tokenizer_class",
        "partial_rotary_factor",
    ),
    *(
        "max_position_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "use_cache",
        "text_config",
        "id2label",
    ),
]


class Endless(KeyboardInterrupt):
    """Not an ``Exception``, which loading might take for one of a library."""


@contextmanager
def within(seconds: int):
    """A case that takes longer counts as one that never ends."""

    def stop(*_: object) -> None:
        raise Endless(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- mutations -----------------------------------------------------------------------------------------------------


def places(value: Any, inside: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every node of a JSON value."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value[:50]))
    return [inside, *(place for key, child in entries for place in places(child, (*inside, key)))]


def change_node(found: Any, dice: random.Random) -> Any:
    """One node deleted, or with another value."""
    place = dice.choice([p for p in places(found) if p])
    parent = found
    for key in place[:-1]:
        parent = parent[key]
    if dice.random() < 0.25:
        del parent[place[-1]]
    else:
        parent[place[-1]] = dice.choice(VALUES)
    return found


def change_json(content: bytes, dice: random.Random) -> bytes:
    found = json.loads(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if places(found) != [()]:
            found = change_node(found, dice)
    if dice.random() < 0.3:
        found[dice.choice(KEYS)] = dice.choice(VALUES)
    return json.dumps(found).encode()


def change_bytes(content: bytes, dice: random.Random) -> bytes:
    kind, place = dice.randrange(4), dice.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + content[place + dice.randrange(1, 9) :]
    if kind == 2:
        return content[:place] + dice.randbytes(dice.randrange(1, 9)) + content[place:]
    return content[:place] + bytes([dice.randrange(256)]) + content[place + 1 :]


def change_text(content: bytes, dice: random.Random) -> bytes:
    return (change_json if dice.random() < 0.8 else change_bytes)(content, dice)


def change_safetensors(content: bytes, dice: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = dice.randrange(5)
    if kind == 0:
        return change_bytes(content, dice)
    if kind == 1:
        return content[: 8 + length] + change_bytes(data, dice)
    if kind == 2:
        header = change_bytes(header, dice)
    elif kind == 3:
        header = json.dumps(change_node(json.loads(header), dice)).encode()
    else:
        header = change_entry(json.loads(header), dice)
    return struct.pack("<Q", len(header)) + header + data


def change_entry(header: dict[str, Any], dice: random.Random) -> bytes:
    """A tensor with another name, type, shape or place that may well be valid."""
    names = [name for name in header if name != "__metadata__"]
    name, other = dice.sample(names, 2)
    kind = dice.randrange(4)
    if kind == 0:
        header[name + ".x"] = header.pop(name)
    elif kind == 1:
        header[name]["dtype"] = dice.choice(("I32", "U32", "F32", "BF16", "F16", "F64", "I8", "BOOL"))
    elif kind == 2:
        header[name]["shape"] = header[name]["shape"][::-1]
    else:
        header[name], header[other] = header[other], header[name]
    return json.dumps(header).encode()


# -- what must hold ------------------------------------------------------------------------------------------------


def check_equal(model: headtrace.Model, folder: Path) -> None:
    """Every parameter is a tensor of the file, every tensor of the file a parameter (or a buffer made anew)."""
    prefix, renamed = model.hf.base_model_prefix + ".", {"embed_out.weight": "lm_head.weight"}
    held = {name.removeprefix(prefix): t for name, t in load_file(folder / "model.safetensors").items()}
    stored = {renamed.get(name, name): tensor for name, tensor in held.items()}
    tied = model.hf.get_input_embeddings().weight is model.hf.get_output_embeddings().weight
    for name, parameter in model.hf.named_parameters():
        short = name.removeprefix(prefix)
        short = "lm_head.weight" if tied and short not in stored else short
        assert torch.equal(parameter, stored[short].float()), f"{name} is not what the file holds"


def outcome(folder: Path) -> str:
    try:
        model = headtrace.load(folder)
    except HeadtraceError as error:
        return type(error).__name__ if str(error).strip() else "no reason given"
    check_equal(model, folder)
    try:
        model.record([3, 4])
    except HeadtraceError as error:  # of two tokens there may be more than memory, or the context, holds
        return f"loaded, then {type(error).__name__}"
    return "loaded"


CASES: dict[str, tuple[str, Callable[[bytes, random.Random], bytes], int]] = {
    "config": ("config.json", change_text, 160),
    "weights": ("model.safetensors", change_safetensors, 160),
    "tokenizer": ("tokenizer.json", change_text, 60),
    "tokenizer_config": ("tokenizer_config.json", change_text, 20),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    source = headtrace.builtin.folder()
    for family in FAMILIES:
        folder = made[family] = tmp_path_factory.mktemp(family)
        tiny_hf(family).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((source / name).read_bytes())
    return made


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm clock")
@pytest.mark.parametrize("kind", CASES)
def test_a_damaged_folder_is_an_error_or_exactly_the_model_in_it(kind: str, folders) -> None:
    name, change, count = CASES[kind]
    first = random.randrange(10**9) if MORE else 0
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + (MORE or count)):
        dice = random.Random(seed)
        folder = folders[dice.choice(FAMILIES)]
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(change(whole, dice))
        try:
            with within(20):
                outcomes[outcome(folder)] += 1
        except BaseException as error:
            pytest.fail(f"case {seed} of {kind} in {folder.name}: {type(error).__name__}: {error}")
        finally:
            (folder / name).write_bytes(whole)
    print(kind, dict(outcomes))
    assert outcomes["InputError"]
    assert outcomes["loaded"]
