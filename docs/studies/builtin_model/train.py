"""Make the built-in model: ``python -m docs.studies.builtin_model.train OUT [--checkpoints DIR]``.

Deterministic: the text comes from SHA-256 streams, the first weights from a fixed seed, and torch is held to
one thread and to its deterministic algorithms. The same versions on the same kind of processor give the same
bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from docs.studies.builtin_model.text import Document, documents, held_out_ioi
from docs.studies.builtin_model.tokenizer import SPECIAL, TOKEN, make_tokenizer
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from headtrace.tasks.answering import accuracy
from headtrace.tasks.registry import TASKS, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHECKPOINTS = (0, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the weights will be."""

    seed: int = 0
    steps: int = 2200
    batch_size: int = 32
    """Documents per step."""
    learning_rate: float = 3e-3
    warmup: int = 100
    """Steps until the learning rate is at its highest; it then falls along a cosine."""
    weight_decay: float = 0.1
    layers: int = 3
    heads: int = 4
    d_model: int = 128
    d_mlp: int = 256
    initial_scale: float = 0.06
    """Standard deviation of the first weights: wider than GPT-2's, since this model is narrower."""


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    torch.manual_seed(recipe.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=recipe.d_model,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        n_inner=recipe.d_mlp,
        initializer_range=recipe.initial_scale,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=SPECIAL.index("<|endoftext|>"),
        eos_token_id=SPECIAL.index("<|endoftext|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
    )
    model = GPT2LMHeadModel(config)
    # Two choices that let heads form sooner. Waves make "the position before" a rotation; and queries that
    # start out equal to keys make like tokens attract each other from the first step on.
    with torch.no_grad():
        blocks: Any = model.transformer.h
        for block in blocks:
            query, key, _ = block.attn.c_attn.weight.split(recipe.d_model, dim=1)
            query.copy_(key)
        model.transformer.wpe.weight.copy_(
            waves(config.n_positions, recipe.d_model, 2**0.5 * recipe.initial_scale)
        )
    return model


def waves(positions: int, width: int, height: float) -> Float[Tensor, "positions width"]:
    """Sines and cosines of the position, from slow to fast: no two positions are alike."""
    speeds = math.pi * (torch.arange(width // 2) + 0.5) / (width // 2)
    angles = torch.outer(torch.arange(positions).float(), speeds)
    return height * torch.cat([angles.sin(), angles.cos()], dim=1)


def training_batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Int[Tensor, "batch time"], Float[Tensor, "batch time"]]]:
    """Token ids, and how much each of them weighs in the loss."""
    vocabulary = tokenizer.get_vocab()
    start = SPECIAL.index("<|endoftext|>")
    stream = documents(recipe.seed, re.compile(TOKEN).findall)
    while True:
        rows: list[Document] = [next(stream) for _ in range(recipe.batch_size)]
        ids = torch.tensor([[start, *(vocabulary[word] for word in row.words)] for row in rows])
        yield ids, torch.tensor([[0.0, *row.weights] for row in rows])


def weighted_loss(
    logits: Float[Tensor, "batch time vocabulary"],
    ids: Int[Tensor, "batch time"],
    weights: Float[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def train(recipe: Recipe, out: Path, checkpoints: Path | None = None) -> GPT2LMHeadModel:
    """Train and save; with ``checkpoints``, also save the model on the way, each as a folder of its own."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = new_model(recipe, tokenizer)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))
    stream = training_batches(recipe, tokenizer)
    started = time.monotonic()
    for step in range(recipe.steps):
        if checkpoints is not None and step in CHECKPOINTS:
            save(model, tokenizer, checkpoints / f"step-{step:05d}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        ids, weights = next(stream)
        loss = weighted_loss(model(ids).logits, ids, weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:5.0f} s", flush=True)
    if checkpoints is not None:
        save(model, tokenizer, checkpoints / f"step-{recipe.steps:05d}")
    save(model, tokenizer, out)
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Accuracy on held-out IOI fill-ins and on every task."""
    model.eval()
    sets = {"ioi held out": held_out_ioi(tokenizer)} | {name: load_task(name, tokenizer) for name in TASKS}
    results: dict[str, object] = {}
    for name, task_set in sets.items():
        result = accuracy(model, task_set)
        print(f"{name:14s} answer beats wrong {result}   answer is first choice {result.top1}")
        results[name] = result.to_dict()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.studies.builtin_model.train", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--checkpoints", type=Path, help="folder for models saved on the way")
    parser.add_argument("--report", type=Path, help="JSON file for the accuracies")
    arguments = parser.parse_args()
    model = train(Recipe(), arguments.out, arguments.checkpoints)
    print("sha256", sha256((arguments.out / "model.safetensors").read_bytes()).hexdigest())
    results = report(model, make_tokenizer())
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
