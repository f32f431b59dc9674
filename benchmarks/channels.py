"""All heads of a model by thin QR, as a ratio to full d x d SVDs of the same heads in float64. Prints JSON.

Full SVDs of all heads take half a minute and more, so in each round one of them is timed, a different head
each time, and counted for all: every head of a model has the same shape. It alternates with all heads by
thin QR, so that a noisy machine disturbs both alike, and both have one thread. CPU time is given beside
wall time, since other processes do not disturb it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headtrace
from headtrace.channels import decompose_model

ROUNDS = 15


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def full_svd(model: headtrace.Model, layer: int, head: int) -> torch.Tensor:
    """What a straightforward implementation does: build W_Q W_K^T and decompose it."""
    weights = model.weights
    W_Q, W_K = weights.W_Q[layer, head].double(), weights.W_K[layer, head // weights.group].double()
    return torch.linalg.svd(W_Q @ W_K.T).S


@torch.inference_mode()
def compare(model: headtrace.Model) -> dict[str, object]:
    n_heads = model.n_layers * model.n_heads
    thin = decompose_model(model)  # warm-up, and folds the weights
    wall: list[float] = []
    cpu: list[float] = []
    worst = 0.0
    for i in range(ROUNDS):
        layer, head = divmod(i * n_heads // ROUNDS, model.n_heads)
        S: list[torch.Tensor] = []
        slow = timed(lambda l=layer, h=head, S=S: S.append(full_svd(model, l, h)))
        fast = timed(lambda: decompose_model(model))
        wall.append(slow[0] * n_heads / fast[0])
        cpu.append(slow[1] * n_heads / fast[1])
        difference = (thin.singular_values[layer, head] - S[0][: model.d_head]).abs().max() / S[0][0]
        worst = max(worst, float(difference))
    return {
        "heads": n_heads,
        "d_model": model.d_model,
        "d_head": model.d_head,
        "full_svds_timed": ROUNDS,
        "each_counted_for_all_heads": True,
        "full_over_thin": round(statistics.median(wall), 1),
        "full_over_thin_cpu_time": round(statistics.median(cpu), 1),
        "largest_relative_difference_of_singular_values": worst,
    }


def gpt2_small_shape() -> headtrace.Model:
    """Twelve layers of twelve heads, width 768, random weights; a small vocabulary, which plays no part
    here."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_embd=768, n_layer=12, n_head=12, bos_token_id=1, eos_token_id=2)
    return headtrace.load(GPT2LMHeadModel(config))


def main() -> None:
    torch.set_num_threads(1)
    smollm2 = {**compare(headtrace.load("smollm2-135m")), "required": 30}
    gpt2 = {**compare(gpt2_small_shape()), "required": 100}
    print(json.dumps({"benchmark": "channels", "smollm2-135m": smollm2, "gpt2-small shape": gpt2}, indent=1))


if __name__ == "__main__":
    main()
