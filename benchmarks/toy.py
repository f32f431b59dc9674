"""The robustness family trained as one ensemble, against its models trained one after another.

Both sides train every model of the family for the same number of steps, in this one run, on one thread:
a model's tensors are too small to share out, and both sides get the same. Two ways to go one by one are
timed: the plain model with PyTorch's gradients and optimiser, and the ensemble's own code with one model.

    python benchmarks/toy.py [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch

from headtrace.toy.experiments.robustness import distinct
from headtrace.toy.reference import train_one
from headtrace.toy.setting import Setting
from headtrace.toy.train import Group, train


def measure(steps: int, seeds: int) -> dict[str, object]:
    settings = distinct(quick=False)
    runs = [(setting, seed) for setting in settings for seed in range(seeds)]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (setting, _) in enumerate(runs):
        groups.setdefault((setting.n_features, setting.context), []).append(index)

    def together() -> None:
        for members in groups.values():
            _steps([runs[i] for i in members], steps)

    def plain() -> None:
        for setting, seed in runs:
            train_one(setting, seed, steps, schedule=10_000)

    def alone() -> None:
        for run in runs:
            _steps([run], steps)

    train(settings[:1], [0], 5)  # first use of every kernel, outside the clock
    train_one(settings[0], 0, 5)
    seconds = {step.__name__: _seconds(step) for step in (together, plain, alone)}
    return {
        "benchmark": "toy robustness family",
        "models": len(runs),
        "steps_per_model": steps,
        "sequential_side": "all models, same number of steps",
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "ratio": seconds["together"] / seconds["plain"],
        "required": 0.25,
        "ratio_to_own_code_one_by_one": seconds["together"] / seconds["alone"],
    }


def _steps(runs: Sequence[tuple[Setting, int]], steps: int) -> None:
    """The first steps of a full training, without the snapshot that ends one."""
    group = Group([run[0] for run in runs], [run[1] for run in runs], 10_000)
    with torch.no_grad():
        for step in range(steps):
            group.step(step)


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(arguments.steps, arguments.seeds), indent=2))
