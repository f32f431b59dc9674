"""Compile small programs into transformer weights with tracr: the models of `compiled.py`.

tracr needs jax, so that this runs in an environment of its own, and the weights are kept in `tests/truth/compiled`:

    python -m venv /tmp/tracr && /tmp/tracr/bin/pip install tracr-pypi safetensors
    /tmp/tracr/bin/python tests/truth/make_compiled.py

`programs.py` says in plain Python what each program computes. Every model is causal and begins with a start token, BOS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import compiling
from tracr.rasp import rasp

FOLDER = Path(__file__).parent / "compiled"
LONGEST = 7
"""Tokens of a prompt, beside BOS."""
LETTERS = ("a", "b", "c", "d")
NUMBERS = (0, 1, 2, 3, 4)


def shifted(values: Any, by: int = 1) -> Any:
    """The value so many positions before."""
    return rasp.Aggregate(rasp.Select(rasp.indices, rasp.indices, lambda k, q: q == k + by), values)


def induction() -> Any:
    """What came after earlier occurrences of this token."""
    return rasp.Aggregate(rasp.Select(shifted(rasp.tokens), rasp.tokens, rasp.Comparison.EQ), rasp.tokens)


def fraction(token: str) -> Any:
    """The fraction of tokens so far that are this one."""
    is_token = rasp.numerical(rasp.Map(lambda t: float(t == token), rasp.tokens))
    so_far = rasp.Select(rasp.indices, rasp.indices, rasp.Comparison.LEQ)
    return rasp.numerical(rasp.Aggregate(so_far, is_token, default=0))


def balance() -> Any:
    """The fraction of "a" minus the fraction of "b"."""
    return rasp.numerical(rasp.LinearSequenceMap(fraction("a"), fraction("b"), 1, -1))


def histogram() -> Any:
    """How often this token has occurred so far."""
    return rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.EQ))


def token_at_count() -> Any:
    """The token at the position whose number is this token's count: an MLP writes the query."""
    return rasp.Aggregate(rasp.Select(rasp.indices, histogram(), rasp.Comparison.EQ), rasp.tokens)


def sort() -> Any:
    """Tokens that, when they came, had two fewer smaller ones before them than this position's number: an MLP
    writes the key."""
    rank = rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.LT))
    return rasp.Aggregate(rasp.Select(rank, rasp.indices, lambda k, q: k == q - 2), rasp.tokens)


def detect() -> Any:
    """Whether the last three tokens are "abc"."""

    def both(x: bool, y: bool) -> bool:
        return x and y

    is_c = rasp.Map(lambda t: t == "c", rasp.tokens)
    was_b = shifted(rasp.Map(lambda t: t == "b", rasp.tokens), 1)
    was_a = shifted(rasp.Map(lambda t: t == "a", rasp.tokens), 2)
    return rasp.SequenceMap(both, rasp.SequenceMap(both, is_c, was_b), was_a)


def equal_two_before() -> Any:
    """Whether this token is the same as the one two before."""
    return rasp.SequenceMap(lambda x, y: x == y, rasp.tokens, shifted(rasp.tokens, 2))


def after_pair() -> Any:
    """What came after earlier occurrences of the last two tokens: an MLP joins them, for the query and for the key."""
    pair = rasp.SequenceMap(lambda x, y: f"{x}{y}", shifted(rasp.tokens), rasp.tokens)
    return rasp.Aggregate(rasp.Select(shifted(pair), pair, rasp.Comparison.EQ), rasp.tokens)


def from_length() -> Any:
    """The token at the position that is the length less this position's number: one MLP reads another."""
    every = rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.TRUE)
    place = rasp.SequenceMap(lambda n, i: n - i, rasp.SelectorWidth(every), rasp.indices)
    return rasp.Aggregate(rasp.Select(rasp.indices, place, rasp.Comparison.EQ), rasp.tokens)


def times_behind() -> Any:
    """At how many positions so far there were more "b" than "a": a head attends to BOS unless it finds others."""
    behind = rasp.Map(lambda x: x < 0, balance())
    return rasp.SelectorWidth(rasp.Select(behind, behind, lambda k, q: k))


def count_of_previous() -> Any:
    """How often the token before this one has occurred so far: a head writes the query of the one that counts."""
    return rasp.SelectorWidth(rasp.Select(rasp.tokens, shifted(rasp.tokens), rasp.Comparison.EQ))


def token_at_half() -> Any:
    """The token at half of this position's number: an MLP that reads the position alone writes the query."""
    half = rasp.Map(lambda i: i // 2, rasp.indices)
    return rasp.Aggregate(rasp.Select(rasp.indices, half, rasp.Comparison.EQ), rasp.tokens)


def ahead() -> Any:
    """Whether there are more "a" than "b" so far: an MLP compares what two heads average."""
    return rasp.Map(lambda x: x > 0, balance())


PROGRAMS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "previous token": (lambda: shifted(rasp.tokens), LETTERS),
    "shift by two": (lambda: shifted(shifted(rasp.tokens)), LETTERS),
    "induction": (induction, LETTERS),
    "fraction of previous": (lambda: fraction("a"), LETTERS),
    "pair balance": (balance, LETTERS),
    "histogram": (histogram, LETTERS),
    "duplicate": (lambda: rasp.Map(lambda n: n > 1, histogram()), LETTERS),
    "token at count": (token_at_count, LETTERS),
    "sort": (sort, NUMBERS),
    "detect abc": (detect, LETTERS),
    "equal two before": (equal_two_before, LETTERS),
    "after pair": (after_pair, LETTERS[:3]),
    "from length": (from_length, LETTERS),
    "times behind": (times_behind, LETTERS),
    # Held out: the methods had their present form before these three were first tried.
    "count of previous": (count_of_previous, LETTERS),
    "token at half": (token_at_half, LETTERS),
    "ahead": (ahead, LETTERS),
}


def weights(compiled: Any, outputs: list[Any]) -> dict[str, np.ndarray]:
    """All matrices for row vectors, one per layer and head; no biases, since tracr has none but zeros."""
    parameters = {
        f"{module}/{name}": np.asarray(value)
        for module, arrays in compiled.params.items()
        for name, value in arrays.items()
    }
    config = compiled.model_config
    layers, heads, d_head = range(config.num_layers), config.num_heads, config.key_size
    assert not any(value.any() for name, value in parameters.items() if name.endswith("/b"))

    def stacked(part: str) -> np.ndarray:
        return np.stack([parameters[f"transformer/layer_{layer}/{part}/w"] for layer in layers])

    def reads(part: str) -> np.ndarray:
        whole = stacked(f"attn/{part}")
        return whole.reshape(*whole.shape[:2], heads, d_head).transpose(0, 2, 1, 3)

    token, position = parameters["token_embed/embeddings"], parameters["pos_embed/embeddings"]
    labels: list[str] = compiled.residual_labels
    ours = [label for label in labels if label.startswith("answer") and (":" in label) == bool(outputs)]
    assert len(ours) == max(1, len(outputs)), labels
    in_order = [next(x for x in ours if x.endswith(f":{output}")) for output in outputs] if outputs else ours
    rows = [labels.index(label) for label in in_order]
    written = stacked("attn/linear")
    return {
        "token": token,
        "position": position,
        "unembed": np.eye(token.shape[1], dtype=np.float32)[rows],
        "W_Q": reads("query"),
        "W_K": reads("key"),
        "W_V": reads("value"),
        "W_O": written.reshape(len(written), heads, d_head, -1),
        "W_in": stacked("mlp/linear_1"),
        "W_out": stacked("mlp/linear_2"),
    }


def write_programs(
    programs: Mapping[str, tuple[Callable[[], Any], tuple[Any, ...], int]], folder: Path
) -> None:
    """Write the weights of programs, each with its vocabulary and longest prompt, and what tokens and outputs are."""
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {}
    for name, (program, vocabulary, longest) in programs.items():
        compiled = compiling.compile_rasp_to_model(
            program().named("answer"),
            vocab=set(vocabulary),
            max_seq_len=longest,
            causal=True,
            compiler_bos="BOS",
        )
        encoding = (
            compiled.output_encoder.encoding_map if hasattr(compiled.output_encoder, "encoding_map") else {}
        )
        outputs = sorted(encoding, key=encoding.__getitem__)
        arrays = weights(compiled, outputs)
        file = folder / f"{name.replace(' ', '_')}.safetensors"
        save_file({key: np.ascontiguousarray(value, np.float32) for key, value in arrays.items()}, file)
        tokens = sorted(
            compiled.input_encoder.encoding_map, key=compiled.input_encoder.encoding_map.__getitem__
        )
        about[name] = {"tokens": tokens, "outputs": outputs or None}
        print(name, {key: value.shape for key, value in arrays.items()}, flush=True)
        (folder / "programs.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    write_programs({name: (*program, LONGEST) for name, program in PROGRAMS.items()}, FOLDER)
