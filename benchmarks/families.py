"""Distances and tree of simulated circuits: seconds, peak memory, ratios to one dense product. Prints JSON.

    python benchmarks/families.py            # 3,000 circuits
    python benchmarks/families.py 20000

Circuits are drawn from a few mechanisms, each with as many items as circuits of SmolLM2 have at the finest grain.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np
from scipy import sparse

from headtrace.families.clustering import average_linkage, by_size, choose, condensed, cuts, sums_to_clusters

ITEMS, PER_CIRCUIT, MECHANISMS = 6000, 250, 4
REQUIRED = {3000: (60.0, 2.0), 20000: (900.0, 8.0)}
"""Seconds and GB that are allowed."""


def simulated(n: int, seed: int = 0) -> sparse.csr_array:
    """Circuits of a few mechanisms: each has items of its own and items that all share, every one present by chance."""
    rng = np.random.default_rng(seed)
    mechanism = rng.integers(0, MECHANISMS, n)
    popularity = rng.pareto(1.2, (MECHANISMS, ITEMS)) * (rng.random((MECHANISMS, ITEMS)) < 0.4)
    popularity *= PER_CIRCUIT / popularity.sum(1, keepdims=True)
    chance = np.minimum(popularity, 0.9).astype(np.float32)
    rows = [np.flatnonzero(rng.random(ITEMS, dtype=np.float32) < chance[m]) for m in mechanism]
    ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    columns = np.concatenate(rows)
    return sparse.csr_array((np.ones(len(columns), dtype=np.float32), columns, ends), (n, ITEMS))


def dense_product(size: int = 2000) -> float:
    """Seconds of a dense product on this machine, as a unit."""
    matrix = np.random.default_rng(0).random((size, size), dtype=np.float32)
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start


def peak() -> float:
    """Gigabytes that this process has had at the most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main(n: int) -> None:
    matrix = simulated(n)
    dense_product()
    unit = min(dense_product() for _ in range(3))
    spent: dict[str, float] = {}
    start = time.perf_counter()
    distances = condensed(matrix)
    spent["distances"] = time.perf_counter() - start
    start = time.perf_counter()
    tree = average_linkage(distances)
    spent["linkage"] = time.perf_counter() - start
    del distances
    start = time.perf_counter()
    choice = choose(matrix)
    spent["choice"] = time.perf_counter() - start
    start = time.perf_counter()
    family = by_size(cuts(tree, choice.n)[-1])
    sums_to_clusters(matrix, family - 1, choice.n)
    spent["representatives"] = time.perf_counter() - start
    seconds, gigabytes = REQUIRED.get(n, (None, None))
    found = {
        "benchmark": "families",
        "circuits": n,
        "items_per_circuit": round(matrix.nnz / n, 1),
        "families": choice.n,
        "mechanisms": MECHANISMS,
        "seconds": {name: round(value, 2) for name, value in spent.items()},
        "over_dense_product": {name: round(value / unit, 1) for name, value in spent.items()},
        "peak_gb": round(peak(), 2),
        "distances_and_linkage_seconds": round(spent["distances"] + spent["linkage"], 2),
        "required_seconds": seconds,
        "required_gb": gigabytes,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
