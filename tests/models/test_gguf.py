"""GGUF files: whole ones become the model they hold, and all others an error that says what is wrong."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import headtrace
from headtrace.errors import InputError, OutOfMemoryError
from tests.tiny import tiny_hf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "cache"))


def small() -> object:
    return tiny_hf("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, num_hidden_layers=2)


def write(path: Path, hf, *, without: str = "", spoil: str = "", **facts: int) -> Path:
    """A GGUF file of a small Llama model, as llama.cpp would lay it out (queries and keys interleaved)."""
    writer, config = gguf.GGUFWriter(str(path), "llama"), hf.config
    sizes = {
        "block_count": 2,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "context_length": 64,
    } | facts
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(61)
    for key, tensor in hf.state_dict().items():
        name = key
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        values = tensor.numpy().astype(np.float32)
        if "attn_q" in name or "attn_k" in name:
            values = values.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(values.shape)
        if name == spoil:
            values[0] = np.nan
        if name != without:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_whole_file_is_the_model_it_holds_and_needs_no_tokenizer(tmp_path) -> None:
    hf = small()
    model = headtrace.load(write(tmp_path / "a.gguf", hf))
    assert model.tokenizer is None
    assert model.weights_sha256 == headtrace.load(hf).weights_sha256
    assert torch.equal(model.record([3, 4, 5]).logits, headtrace.load(hf).record([3, 4, 5]).logits)


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_norm.weight", "token_embd.weight"])
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path) -> None:
    path = write(tmp_path / "a.gguf", small(), without=name)
    with pytest.raises(InputError, match=r"have no 'model\.(layers|embed_tokens)"):
        headtrace.load(path)
    assert not list((tmp_path / "cache" / "gguf").glob("*"))


def test_a_tensor_that_is_not_finite_is_named(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", small(), spoil="blk.1.ffn_up.weight")
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight' is not finite"):
        headtrace.load(path)


@pytest.mark.parametrize(
    "facts",
    [{"block_count": 3}, {"block_count": 10**9}, {"embedding_length": 2**31}, {"feed_forward_length": 2**31}],
)
def test_metadata_that_its_tensors_contradict_is_refused(facts: dict, tmp_path) -> None:
    with pytest.raises(InputError, match=r"have no|its tensors allow"):
        headtrace.load(write(tmp_path / "a.gguf", small(), **facts))


def test_a_model_too_large_for_memory_stops_before_it_is_read(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "a.gguf", small())
    monkeypatch.setattr("headtrace.models.gguf_files.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"needs about .* 1 KB is available"):
        headtrace.load(path)


def test_a_damaged_copy_in_the_cache_is_made_again(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", small())
    expected = headtrace.load(path).weights_sha256
    (folder,) = (tmp_path / "cache" / "gguf").iterdir()
    weights = folder / "model.safetensors"
    for damage in (
        lambda: weights.write_bytes(weights.read_bytes()[:500]),
        weights.unlink,
        (folder / "config.json").unlink,
        lambda: (folder / "config.json").write_text("{"),
    ):
        damage()
        assert headtrace.load(path).weights_sha256 == expected


def test_counts_and_lengths_larger_than_the_file_end_at_once(tmp_path) -> None:
    path = tmp_path / "a.gguf"
    start = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    for content in (
        b"",
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        start + struct.pack("<QQ", 2**60, 0),
        start + struct.pack("<QQ", 0, 2**60),
        start + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, 2**60),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 2**60),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 2**60),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 77),
        start + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 2**31),
        start + struct.pack("<QQ", 1, 0) + key + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.gguf.*cannot be read"):
            headtrace.load(path)


def test_files_cut_short_and_with_changed_bytes_are_errors_or_the_model(tmp_path) -> None:
    path = write(tmp_path / "a.gguf", small())
    whole, random_ = path.read_bytes(), random.Random(0)
    header = whole.index(b"blk.1.ffn_norm.weight") + 60
    cuts = [whole[: random_.randrange(len(whole))] for _ in range(8)]
    changed = [bytearray(whole) for _ in range(24)]
    for content in changed:
        content[random_.randrange(header)] = random_.randrange(256)
    for content in (*cuts, *map(bytes, changed)):
        path.write_bytes(content)
        try:
            model = headtrace.load(path)
        except headtrace.errors.HeadtraceError:
            continue
        assert model.n_layers == 2
        assert all(torch.isfinite(parameter).all() for parameter in model.hf.parameters())
