"""Cutting a tree into families: into so many, or at a distance; and how well each cut separates (silhouette).

>>> tree = np.array([[0, 1, 0.1, 2], [2, 3, 0.2, 2], [4, 5, 0.9, 4]])
>>> cuts(tree, 3).tolist()
[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2]]
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def cuts(tree: Float[np.ndarray, "merge 4"], most: int) -> Int[np.ndarray, "cut n"]:
    """The clusters of every circuit when the tree is cut into 1, 2, ... ``most``: one row each.

    Exactly so many, also where merges are at the same height: the last merges are undone, one by one. Clusters are
    numbered by their first circuit.
    """
    n = len(tree) + 1
    most = min(most, n)
    children = tree[:, :2].astype(np.int64)
    finest = 2 * n - 1 - (most - 1)  # nodes from here on are undone in the finest cut
    top = np.arange(2 * n - 1)
    for node in range(min(finest, 2 * n - 1) - 1, n - 1, -1):
        top[children[node - n]] = top[node]
    leaf = top[:n]
    found: list[np.ndarray] = []
    for count in range(most, 0, -1):
        if count < most:  # redo one merge
            merged = 2 * n - 1 - count
            leaf = np.where(np.isin(leaf, children[merged - n]), merged, leaf)
        found.append(_by_first(leaf))
    return np.stack(found[::-1])


def clusters_below(tree: Float[np.ndarray, "merge 4"], distance: float) -> int:
    """Into how many clusters the tree falls when merges above a distance are undone."""
    return 1 + int((tree[:, 2] > distance).sum())


def silhouettes(
    sums: Float[np.ndarray, "n cluster"], finest: Int[np.ndarray, " n"], cut: Int[np.ndarray, "cut n"]
) -> Float[np.ndarray, " cut"]:
    """The mean silhouette of every cut, from the summed distances to the clusters of the finest.

    Cuts of one tree are nested, so one pass over the distances serves them all. A circuit that is alone has a
    silhouette of 0, and so has everything in one cluster.
    """
    first = np.unique(finest, return_index=True)[1]
    return np.array([_silhouette(sums, clusters[first], clusters) for clusters in cut])


def _silhouette(
    sums: Float[np.ndarray, "n cluster"], coarser: Int[np.ndarray, " cluster"], own: Int[np.ndarray, " n"]
) -> float:
    count = int(own.max()) + 1
    if count < 2:
        return 0.0
    total = sums @ np.eye(count)[coarser]
    sizes, every = np.bincount(own), np.arange(len(own))
    inside = total[every, own] / np.maximum(sizes[own] - 1, 1)
    means = total / sizes
    means[every, own] = np.inf
    outside = means.min(axis=1)
    larger = np.maximum(inside, outside)
    values = np.divide(outside - inside, larger, out=np.zeros_like(larger), where=larger > 0)
    return float(np.where(sizes[own] > 1, values, 0.0).mean())


def _by_first(clusters: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Numbered by their first member, from 0."""
    _, first, place = np.unique(clusters, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[place.ravel()]


def by_size(clusters: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Numbered from 1 by falling size; of equal ones, the one with the first circuit comes first.

    >>> by_size(np.array([0, 1, 1, 0, 1])).tolist()
    [2, 1, 1, 2, 1]
    """
    plain = _by_first(clusters)
    order = np.argsort(-np.bincount(plain), kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(1, len(order) + 1)
    return number[plain]
