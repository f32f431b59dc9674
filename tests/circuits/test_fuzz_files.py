"""Damaged circuit files and tables: an error that says so, or the circuit; never half of it, nor another exception.

``HEADTRACE_FUZZ_FILES=5000`` damages each of them as often instead of a few hundred times.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from made_up import complete_circuit, content_circuit, random_circuit, small_circuit, worded_circuit

from headtrace.circuits import Circuit, load_circuit, read_parquet, write_parquet
from headtrace.circuits.files import dumps, from_json, loads
from headtrace.errors import InputError
from tests.mutation import VALUES, misshaped, mutated, told

CIRCUITS = [worded_circuit(), content_circuit(), complete_circuit(), random_circuit(25)]
DATA = Path(__file__).parent / "data"
DAMAGES = int(os.environ.get("HEADTRACE_FUZZ_FILES", "400"))


@pytest.mark.parametrize("circuit", CIRCUITS[:3], ids=["attention", "content", "complete"])
def test_damaged_bytes_of_a_circuit_file(circuit: Circuit, tmp_path: Path) -> None:
    rng, content, path = random.Random(0), dumps(circuit).encode(), tmp_path / "c.json"
    for _ in range(DAMAGES):
        path.write_bytes(mutated(content, rng))
        try:
            found = load_circuit(path)
        except InputError as error:
            told(error, str(path))
        else:
            assert loads(dumps(found)) == found


@pytest.mark.parametrize(
    "source", ["worded", "content", "complete", "linear-1", "direction-1", "heads-1", "probability-1"]
)
def test_misshaped_data_of_a_circuit_file(source: str) -> None:
    made = {"worded": worded_circuit, "content": content_circuit, "complete": complete_circuit}
    text = dumps(made[source]()) if source in made else (DATA / f"{source}.json").read_text()
    rng = random.Random(1)
    for _ in range(DAMAGES // 2):
        data = misshaped(json.loads(text), rng)
        try:
            found = from_json(data)
        except InputError as error:
            told(error)
        else:
            assert loads(dumps(found)) == found
            assert found.content_id == loads(dumps(found)).content_id


def test_a_file_that_ends_early_is_never_a_circuit(tmp_path: Path) -> None:
    text = dumps(small_circuit()).rstrip()
    for end in range(0, len(text), 7):
        with pytest.raises(InputError):
            loads(text[:end])


# -- tables ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(CIRCUITS, tmp_path_factory.mktemp("tables") / "c.parquet")


@pytest.mark.parametrize("numbered", [False, True], ids=["now", "before"])
def test_damaged_bytes_of_a_table(table: Path, tmp_path: Path, numbered: bool) -> None:
    rng, path = random.Random(2), tmp_path / "c.parquet"
    source = DATA / "numbered.parquet" if numbered else table
    content, whole = source.read_bytes(), read_parquet(source)
    for _ in range(DAMAGES):
        path.write_bytes(mutated(content, rng))
        try:
            found = read_parquet(path)
        except InputError as error:
            told(error)
        else:
            # Without content ids, a number that changed cannot be told from one that was written.
            assert numbered or found == whole
            assert all(loads(dumps(circuit)) == circuit for circuit in found)


def changed(frame: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    """Rows left out, doubled, shuffled, filtered or put together with others."""
    height, seed = frame.height, rng.randrange(10**6)
    match rng.randrange(8):
        case 0:
            return frame.filter(pl.Series(range(height)) != rng.randrange(height))
        case 1:
            start = rng.randrange(height)
            return frame.vstack(frame[start : start + rng.choice((1, 3, 30))])
        case 2:
            return frame.sample(fraction=1.0, shuffle=True, seed=seed)
        case 3:
            return frame.filter((pl.col("weight") > rng.random()) | pl.col("circuit_json").is_not_null())
        case 4:
            return frame.filter(pl.col("circuit") != rng.choice(CIRCUITS).content_id)
        case 5:
            return frame.vstack(frame)
        case 6:
            return frame.sort(rng.choice(("weight", "side", "target_layer", "circuit")))
        case _:
            return frame[: rng.randrange(1, height)]


def expected(frame: pl.DataFrame) -> Counter[str] | None:
    """How often each circuit is there, if each has all of its rows equally often."""
    counts: Counter[str] = Counter()
    for circuit in CIRCUITS:
        rows = frame.filter(pl.col("circuit") == circuit.content_id)
        if not rows.height:
            continue
        copies = rows.group_by("source", "target", "side").len()
        if copies.height != len(circuit.edges) or copies["len"].n_unique() != 1:
            return None
        if rows["circuit_json"].is_not_null().sum() != copies["len"][0]:
            return None
        counts[circuit.content_id] = copies["len"][0]
    return counts


def test_rows_that_are_lost_doubled_shuffled_or_put_together(table: Path, tmp_path: Path) -> None:
    rng, whole, path = random.Random(3), pl.read_parquet(table), tmp_path / "c.parquet"
    outcomes: Counter[bool] = Counter()
    for _ in range(400):
        frame = whole
        for _ in range(rng.choice((1, 1, 2))):
            frame = changed(frame, rng) if frame.height else frame
        frame.write_parquet(path)
        wanted = expected(frame)
        outcomes[wanted is None] += 1
        if wanted is None:
            with pytest.raises(InputError, match="circuit"):
                read_parquet(path)
        else:
            found = read_parquet(path)
            assert Counter(circuit.content_id for circuit in found) == wanted
            assert all(circuit in CIRCUITS for circuit in found)
    assert min(outcomes.values()) > 50


def test_cells_that_are_changed(table: Path, tmp_path: Path) -> None:
    """A cell that says something about a circuit is missed; one that only repeats it is not."""
    rng, whole, path = random.Random(4), pl.read_parquet(table), tmp_path / "c.parquet"
    for _ in range(DAMAGES):
        name, row = rng.choice(whole.columns), rng.randrange(whole.height)
        values: list[Any] = whole[name].to_list()
        values[row] = rng.choice([*whole[name].to_list(), *VALUES])
        try:
            column = pl.Series(
                name, values, dtype=None if rng.random() < 0.3 else whole[name].dtype, strict=False
            )
            whole.with_columns(column).write_parquet(path)
        except (pl.exceptions.PolarsError, TypeError, OverflowError, UnicodeEncodeError, ValueError):
            continue  # not a table at all
        try:
            assert read_parquet(path) == CIRCUITS
        except InputError as error:
            told(error)
