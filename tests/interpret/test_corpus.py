"""Text for a scan: every form of it comes as the same chunks, and what is no text is refused with advice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headtrace
from headtrace.errors import InputError
from headtrace.interpret import corpus as corpora
from headtrace.interpret.corpus import open_corpus
from tests.interpret.dataset_hub import dataset_hub
from tests.tiny import NAMES, tiny_model

SENTENCE = "When Mary and John went to the store, John gave a drink to Mary. "


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


def chunks(source, model, **options):
    return list(open_corpus(str(source), model, length=32, **options).chunks())


def test_a_text_a_line_and_a_row_give_the_same_tokens(model, tmp_path) -> None:
    text = SENTENCE * 12
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    pl.DataFrame({"text": [text]}).write_parquet(tmp_path / "a.parquet")
    found = [
        [chunk.token_ids for chunk in chunks(tmp_path / f"a.{end}", model)]
        for end in ("txt", "jsonl", "parquet")
    ]
    assert found[0] == found[1] == found[2]
    front = model.to_ids(SENTENCE)[0]
    assert all(ids[0] == front for ids in found[0]), "each chunk begins as a text does"
    assert {len(ids) for ids in found[0][:-1]} == {32}
    own = [token for ids in found[0] for token in ids[1:]]
    assert own == model.to_ids(SENTENCE)[1:] * 12, "no token is lost between chunks"


def test_a_chunk_never_crosses_from_one_text_into_another(model, tmp_path) -> None:
    lines = [{"text": SENTENCE * 2}, {"text": SENTENCE}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    found = chunks(tmp_path / "a.jsonl", model)
    assert [chunk.id for chunk in found] == ["line 1:0", "line 2:0"]


def test_reading_from_a_place_on_gives_what_reading_all_gives(model, tmp_path) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 20)
    for source in (tmp_path / "a.txt", "sampled:700", "task:ioi"):
        corpus = open_corpus(str(source), model, length=32, tokens=640)
        every = list(corpus.chunks())
        assert [chunk.index for chunk in every] == list(range(len(every)))
        assert list(corpus.chunks(17)) == every[17:]


def test_so_many_tokens_are_read_however_short_the_texts_are(model, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": SENTENCE}) + "\n") * 40)
    for source in (tmp_path / "a.jsonl", "task:ioi", "sampled:600"):
        found = chunks(source, model, tokens=300)
        read = [len(chunk.token_ids) for chunk in found]
        assert sum(read) >= 300 > sum(read[:-1])


def test_sampled_text_depends_on_the_seed_only(model) -> None:
    first, again, longer = (chunks(f"sampled:{n}", model, seed=1) for n in (64, 64, 128))
    assert first == again == longer[:2]
    assert first != chunks("sampled:64", model, seed=2)
    assert [len(chunk.token_ids) for chunk in longer] == [32] * 4


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_can_be_sampled_and_is_left_as_it_was(name) -> None:
    """A model without a tokenizer begins with any token; every chunk is as long as asked for."""
    model = tiny_model(name)
    before = model.hf.config._attn_implementation
    found, again = (chunks("sampled:96", model, seed=4) for _ in range(2))
    assert found == again
    assert [len(chunk.token_ids) for chunk in found] == [32] * 3
    assert all(0 <= token < 61 for chunk in found for token in chunk.token_ids)
    assert model.hf.config._attn_implementation == before


def test_a_line_of_ten_megabytes_is_read_in_pieces(model, tmp_path, monkeypatch) -> None:
    longest = []
    monkeypatch.setattr(corpora.Corpus, "_tokens", lambda self, words: longest.append(len(words)) or [5] * 4)
    (tmp_path / "a.txt").write_text("word " * 2_000_000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 2_000_000}))
    for name in ("a.txt", "a.jsonl"):
        assert chunks(tmp_path / name, model, tokens=64)
        assert len(list(open_corpus(str(tmp_path / name), model).chunks())) > 1
    assert max(longest) <= corpora.PIECE


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "holds no text"),
        ("picture.txt", b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8"),
        ("zeros.txt", b"a\0b", "not UTF-8"),
        ("empty.jsonl", b"", "holds no texts"),
        ("other.jsonl", b'{"body": "x"}\n', "line 1: .* needs either 'text'"),
        ("misspelled.jsonl", b'{"txt": "x"}\n', "Did you mean 'text'"),
        ("tokens.jsonl", b'{"text": "x", "tokens": "1 2"}\n', "'tokens' must be a list"),
        ("long.jsonl", b'{"text": "' + b"x" * (1 << 24) + b'"}', "longer than 16 MB"),
        ("not.parquet", b"PAR", "cannot be read as Parquet"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(model, tmp_path, name, content, says) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        chunks(tmp_path / name, model)


def test_a_table_without_text_names_its_columns(model, tmp_path) -> None:
    pl.DataFrame({"body": ["x"]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column 'text': it has 'body'"):
        chunks(tmp_path / "a.parquet", model)
    arrays = {
        "holds int64, not text": pa.array([1]),
        "holds list<.*>, not text": pa.array([["x"]]),
        "holds binary, not text": pa.array([b"x"]),
        "not UTF-8, in row 0": pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
        ),
        "holds no text": pa.array([None, ""], pa.string()),
    }
    for says, array in arrays.items():
        pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=says):
            chunks(tmp_path / "a.parquet", model)
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="several columns 'text'"):
        chunks(tmp_path / "a.parquet", model)


def test_text_is_read_however_a_table_keeps_it(model, tmp_path) -> None:
    texts = pa.array([SENTENCE, None, SENTENCE])
    found = []
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"number": [1, 2, 3], "text": texts.cast(kind)}), tmp_path / "a.parquet")
        found.append(chunks(tmp_path / "a.parquet", model))
    assert found[0] == found[1] == found[2]
    assert [chunk.id for chunk in found[0]] == ["row 0:0", "row 2:0"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.txt", "does not exist"),
        (".", "is a folder"),
        ("sampled:", "like sampled:20000"),
        ("sampled:-3", "like sampled:20000"),
        ("task:nothing", "nothing"),
    ],
)
def test_a_corpus_that_is_none_is_refused_before_anything_runs(model, source, says) -> None:
    with pytest.raises(InputError, match=says):
        open_corpus(source, model)


def test_the_hub_needs_a_package_and_says_which(model, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install '\.\[interpret\]'"):
        open_corpus("owner/name", model)


def test_text_that_the_model_cannot_read_is_refused(model, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("zxcv qwop " * 50)
    with pytest.raises(InputError, match="does not know most of the words"):
        chunks(tmp_path / "a.txt", model)


# The hub, with the library that reads it, against a server that answers as the hub does

READ = """
import json, sys, headtrace
from headtrace.errors import InputError
from headtrace.interpret import open_corpus
model = headtrace.load("builtin")
for source in sys.argv[1:]:
    try:
        print(json.dumps([chunk.token_ids for chunk in open_corpus(source, model, length=32).chunks()]))
    except InputError as error:
        print(json.dumps(str(error)))
"""


def test_a_dataset_of_the_hub_is_streamed_and_no_code_of_it_is_run(model, tmp_path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[interpret]'")
    texts = [SENTENCE * 12, None, "", SENTENCE]
    pl.DataFrame({"number": range(4), "text": texts}).write_parquet(tmp_path / "rows.parquet")
    readme = b"""---
configs:
- {config_name: default, data_files: rows.parquet}
- {config_name: other, data_files: [{split: late, path: rows.parquet}]}
---
"""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts if text)
    rows = (tmp_path / "rows.parquet").read_bytes()
    datasets = {
        "owner/name": {"README.md": readme, "rows.parquet": rows},
        "owner/lines": {"train.jsonl": lines},
        "owner/numbers": {"train.jsonl": b'{"body": "words"}\n'},
        "owner/code": {"code.py": b"print('code was run')"},
    }
    asked = ["hub:owner/name", "owner/lines", "hub:owner/name:other:late"]
    wrong = ["hub:owner/numbers", "hub:owner/name:nothing", "hub:owner/nobody", "hub:owner/code"]
    with dataset_hub(datasets) as hub:
        said = subprocess.run(
            [sys.executable, "-c", READ, *asked, *wrong],
            env={
                **os.environ,
                "HF_ENDPOINT": hub.url,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path / "home"),
                "no_proxy": "127.0.0.1",
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert any(each.startswith("GET") and each.endswith("rows.parquet") for each in hub.asked)
    assert "code was run" not in said.stdout
    by_row, by_line, late, *problems = map(json.loads, said.stdout.splitlines())
    (tmp_path / "same.jsonl").write_bytes(lines)
    own = [list(chunk.token_ids) for chunk in chunks(tmp_path / "same.jsonl", model)]
    assert by_row == by_line == late == own
    for problem, says in zip(
        problems,
        ("no field 'text' of text: it has 'body'", "nothing", "nobody.*hub reachable", "owner/code"),
        strict=True,
    ):
        assert re.search(says, problem), problem
