"""The robustness family trained as one ensemble, against its models trained one after another.

Both sides train every model of the family for the same number of steps, in this one run, with the same number
of threads. Two ways to go one by one are timed: the ensemble's own code with one model, which the required
ratio is about, and the plain model with PyTorch's gradients and optimiser. Rounds alternate, and the best of
each counts: neighbours on a shared machine only ever add time. The clock runs over steps alone: a training has
ten thousand of them, and making a group must not count as if it had a few.

    python benchmarks/toy.py [--steps 30] [--rounds 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch

from headtrace.toy.experiments.robustness import distinct
from headtrace.toy.model import Setting
from headtrace.toy.train import Group, train
from toy_reference import train_one


def measure(steps: int, seeds: int, rounds: int) -> dict[str, object]:
    settings = distinct(quick=False)
    runs = [(setting, seed) for setting in settings for seed in range(seeds)]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (setting, _) in enumerate(runs):
        groups.setdefault((setting.n_features, setting.context), []).append(index)

    ensembles = [_group([runs[i] for i in members]) for members in groups.values()]
    singles = [_group([run]) for run in runs]

    def together() -> float:
        return _seconds(lambda: _steps(ensembles, steps))

    def alone() -> float:
        return _seconds(lambda: _steps(singles, steps))

    def plain() -> float:
        return _seconds(lambda: [train_one(*run, steps, schedule=10_000) for run in runs])

    train(settings[:1], [0], 5)  # first use of every kernel, outside the clock
    train_one(settings[0], 0, 5)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for work in (together, alone, plain):
            seconds.setdefault(work.__name__, []).append(work())
    best = {name: min(taken) for name, taken in seconds.items()}
    return {
        "benchmark": "toy robustness family",
        "models": len(runs),
        "steps_per_model": steps,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "ratio": best["together"] / best["alone"],
        "required": 0.25,
        "ratio_to_plain_pytorch_one_by_one": best["together"] / best["plain"],
    }


def _group(runs: Sequence[tuple[Setting, int]]) -> Group:
    return Group([run[0] for run in runs], [run[1] for run in runs], 10_000)


def _steps(groups: Sequence[Group], steps: int) -> None:
    """The first steps of a full training, one group after another."""
    with torch.no_grad():
        for group in groups:
            for step in range(steps):
                group.step(step)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(measure(arguments.steps, arguments.seeds, arguments.rounds), indent=2))
