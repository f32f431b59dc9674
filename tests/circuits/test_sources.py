"""A circuit is found wherever it is kept, and an error says how to name it."""

from __future__ import annotations

import io
import sys

import pytest
from made_up import content_circuit, small_circuit

from headtrace.circuits import named_circuits, read_circuit, read_circuits, write_parquet
from headtrace.circuits.files import dumps
from headtrace.errors import InputError

CIRCUITS = [small_circuit(), content_circuit()]


def test_every_kind_of_source_gives_the_same_circuits(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "folder"
    for number, circuit in enumerate(CIRCUITS):
        circuit.save(folder / f"circuit-{number}.json")
    (folder / "verification.json").write_text("{}")
    table = write_parquet(CIRCUITS, tmp_path / "many.parquet")
    unnamed = tmp_path / "table"
    unnamed.write_bytes(table.read_bytes())
    for source in (folder, table, unnamed):
        assert read_circuits(source) == CIRCUITS
        assert read_circuits(f"{source}#1") == [CIRCUITS[1]]
        assert [read_circuit(name) for name, _ in named_circuits(source)] == CIRCUITS
    assert read_circuit(folder / "circuit-1.json") == CIRCUITS[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(dumps(CIRCUITS[0])))
    assert read_circuit("-") == CIRCUITS[0]


def test_a_file_whose_name_has_a_number_sign_is_that_file(tmp_path) -> None:
    path = CIRCUITS[0].save(tmp_path / "run#3")
    assert read_circuit(path) == CIRCUITS[0]


def test_what_is_not_there_is_said(tmp_path) -> None:
    table = write_parquet(CIRCUITS, tmp_path / "many.parquet")
    (tmp_path / "empty").mkdir()
    for source, message in (
        (f"{table}#2", "there is no circuit 2 .* which holds 2, numbered from 0"),
        (table, "holds 2 circuits and one is expected.*many.parquet#0"),
        (tmp_path / "empty", "holds no circuit files"),
        (tmp_path / "none.json", "No circuit file"),
        (tmp_path / "none.parquet#1", "No Parquet file"),
        ("nul\0.json", "null|cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            read_circuit(source)
