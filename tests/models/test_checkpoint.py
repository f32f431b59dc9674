"""A folder is the model that it says, or an error names what is wrong with it: never random weights, never a pickle."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headtrace
from headtrace.cli import main
from headtrace.errors import InputError, OutOfMemoryError
from tests.tiny import NAMES, tiny_hf

FIRST = {"gpt2": "transformer.h.0.", "opt": "model.decoder.layers.0.", "gpt_neox": "gpt_neox.layers.0."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_hf("llama").save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


# -- missing, left over, mis-shaped, not finite ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_is_missing_is_named(name: str, tmp_path) -> None:
    tiny_hf(name).save_pretrained(tmp_path)
    headtrace.load(tmp_path)
    start = FIRST.get(name, "model.layers.0.")
    key = next(key for key in load_file(tmp_path / "model.safetensors") if key.startswith(start))
    change_weights(tmp_path, without(key))
    with pytest.raises(InputError, match=f"not whole: its files have no '{key}'"):
        headtrace.load(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_weights_are_refused(key: str, tmp_path) -> None:
    tiny_hf("llama" if key == "num_hidden_layers" else "gpt2").save_pretrained(tmp_path)
    change_config(tmp_path, **{key: 5}, layer_types=None)
    with pytest.raises(InputError, match=r"have no '(model.layers|transformer.h)\.4\..* more"):
        headtrace.load(tmp_path)


def test_fewer_layers_than_weights_are_refused(folder) -> None:
    change_config(folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(InputError, match=r"hold 'model\.layers\.3\.input_layernorm\.weight'.*no place"):
        headtrace.load(folder)


def test_a_weight_too_many_is_named(folder) -> None:
    change_weights(
        folder, lambda tensors: {**tensors, "model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}
    )
    with pytest.raises(InputError, match=r"hold 'model\.layers\.1\.self_attn\.q_proj\.bias'"):
        headtrace.load(folder)


def test_a_config_of_other_sizes_is_refused_with_the_first_weight_that_differs(folder) -> None:
    change_config(folder, intermediate_size=40)
    with pytest.raises(
        InputError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight'.*\(32, 40\).*\(32, 48\)"
    ):
        headtrace.load(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(value: float, folder) -> None:
    def spoil(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = value
        return tensors

    change_weights(folder, spoil)
    with pytest.raises(InputError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' is not finite.*\(3, 5\)"):
        headtrace.load(folder)


def test_a_loaded_module_with_a_weight_that_is_not_finite_is_refused() -> None:
    hf = tiny_hf("gpt2")
    with torch.no_grad():
        hf.transformer.h[1].ln_1.bias[4] = torch.nan
    with pytest.raises(InputError, match=r"'transformer\.h\.1\.ln_1\.bias' is not finite: 1 of 32"):
        headtrace.load(hf)


def test_large_finite_weights_whose_sum_overflows_are_fine() -> None:
    hf = tiny_hf("gpt2")
    with torch.no_grad():
        hf.transformer.wpe.weight.fill_(3e38)
    headtrace.load(hf)


def test_modules_of_mixed_or_absent_numbers_are_refused() -> None:
    hf = tiny_hf("llama")
    hf.model.layers[2].mlp.double()
    with pytest.raises(
        InputError, match=r"'model\.layers\.2\.mlp\.gate_proj\.weight' is in float64.*others.*float32"
    ):
        headtrace.load(hf)
    with pytest.raises(InputError, match=r"'model\.embed_tokens\.weight' has no values"):
        headtrace.load(tiny_hf("llama").to("meta"))
    hf = tiny_hf("llama")
    del hf.model.layers[3]
    with pytest.raises(InputError, match="says 4 layers, and the model has 3"):
        headtrace.load(hf)


def test_integers_in_the_place_of_weights_are_refused(folder) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.int32)})
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'.*stored as I32"):
        headtrace.load(folder)


# -- what old and tied checkpoints look like, which is fine -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix", "extra"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": ()}),
        (
            "gpt_neox",
            "",
            {
                "gpt_neox.layers.0.attention.bias": (1, 1, 64, 64),
                "gpt_neox.layers.0.attention.masked_bias": (),
                "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (2,),
            },
        ),
        ("llama", "", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    ],
)
def test_buffers_of_old_checkpoints_are_no_weights(name: str, prefix: str, extra: dict, tmp_path) -> None:
    hf = tiny_hf(name)
    hf.save_pretrained(tmp_path)
    buffers = {key: torch.ones(shape) for key, shape in extra.items()}
    change_weights(
        tmp_path, lambda tensors: {k.removeprefix(prefix): t for k, t in tensors.items()} | buffers
    )
    assert headtrace.load(tmp_path).weights_sha256 == headtrace.load(hf).weights_sha256


def test_a_buffer_by_name_only_is_a_weight_too_many(folder) -> None:
    extra = {"model.layers.0.self_attn.bias": torch.ones(32)}
    change_weights(folder, lambda tensors: {**tensors, **extra})
    with pytest.raises(InputError, match=r"'model\.layers\.0\.self_attn\.bias'"):
        headtrace.load(folder)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both", "both, different"])
def test_tied_embeddings_come_from_whichever_the_file_holds(kept: str, tmp_path) -> None:
    hf = tiny_hf("llama", tie_word_embeddings=True)
    hf.save_pretrained(tmp_path)
    shared = hf.lm_head.weight.detach().clone()
    both = {
        "model.embed_tokens.weight": shared,
        "lm_head.weight": shared.clone() + (kept == "both, different"),
    }

    def change(tensors):
        rest = {key: tensor for key, tensor in tensors.items() if key not in both}
        return rest | ({kept: both[kept]} if kept in both else both)

    change_weights(tmp_path, change)
    model = headtrace.load(tmp_path)
    assert torch.equal(model.hf.lm_head.weight, both["lm_head.weight"])
    assert torch.equal(model.hf.model.embed_tokens.weight, both["model.embed_tokens.weight"])


def test_an_untied_model_without_its_unembedding_is_refused(tmp_path) -> None:
    tiny_hf("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"have no 'lm_head\.weight'"):
        headtrace.load(tmp_path)


# -- shards ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    tiny_hf("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def test_sharded_weights_load_and_a_missing_or_damaged_shard_is_named(shards) -> None:
    model = headtrace.load(shards)
    assert model.weights_sha256 == headtrace.load(tiny_hf("llama")).weights_sha256
    last = max(shards.glob("model-*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{last.name}.*cannot be read"):
        headtrace.load(shards)
    last.unlink()
    with pytest.raises(InputError, match=f"names {last.name}, which is not there"):
        headtrace.load(shards)


def test_a_weight_missing_from_its_shard_is_named(shards) -> None:
    shard = max(shards.glob("model-*.safetensors"))
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file(without(name)(tensors) or {"x": torch.zeros(1)}, shard, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"have no '{name}'"):
        headtrace.load(shards)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("[]", "expected a JSON object"),
        ("{", "cannot be read"),
        ('{"weight_map": 3}', "no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "expected a .safetensors file beside it"),
        ('{"weight_map": {"a": "weights.bin"}}', "expected a .safetensors file beside it"),
    ],
)
def test_a_damaged_index_is_named(index: str, reason: str, shards) -> None:
    (shards / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=reason):
        headtrace.load(shards)


# -- pickles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt"])
def test_pickled_weights_are_refused_unopened_with_the_way_to_convert_them(
    file: str, folder, monkeypatch
) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if file.endswith(".json"):
        (folder / file).write_text(
            json.dumps({"weight_map": dict.fromkeys(tensors, "pytorch_model-00001.bin")})
        )
    else:
        torch.save(tensors, folder / file)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(
        InputError, match=rf"(?s)pickled weights only \({file}\).*use_safetensors=False\)\.save"
    ):
        headtrace.load(folder)


def test_the_way_to_convert_pickles_works_as_it_is_printed(folder, tmp_path, monkeypatch) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        headtrace.load(folder)
    lines = [line.strip() for line in str(refused.value).splitlines() if line.startswith("    ")]
    exec("\n".join(line for line in lines if "AutoTokenizer.from" not in line))
    assert headtrace.load("converted").weights_sha256 == headtrace.load(tiny_hf("llama")).weights_sha256


def test_pickles_beside_safetensors_are_left_alone(folder, monkeypatch) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert headtrace.load(folder).weights_sha256 == headtrace.load(tiny_hf("llama")).weights_sha256


def test_an_adapter_is_no_model(folder) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter"):
        headtrace.load(folder)


# -- damaged files, absurd sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"text"', "[" * 100_000, '{"model_type": 3}', "{}"])
def test_a_damaged_config_is_named(text: str, folder) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        headtrace.load(folder)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"num_hidden_layers": 10**9}, "llama"),
        ({"num_hidden_layers": 10**9}, "gemma3_text"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "qwen2"),
        ({"n_layer": 10**9}, "gpt2"),
        ({"num_hidden_layers": 1e9}, "gpt2"),
        ({"hidden_size": 10**9}, "llama"),
        ({"hidden_size": 10**9, "head_dim": 10**8}, "qwen3"),
        ({"vocab_size": 10**12}, "llama"),
        ({"vocab_size": 10**30}, "llama"),
        ({"intermediate_size": 10**10}, "llama"),
        ({"intermediate_size": -1}, "llama"),
        ({"n_positions": 10**12}, "gpt2"),
        ({"num_attention_heads": 0}, "llama"),
        ({"num_attention_heads": 10**9}, "llama"),
        ({"hidden_size": "wide"}, "llama"),
        ({"hidden_size": None}, "llama"),
        ({"hidden_act": "no such function"}, "llama"),
        ({"rope_parameters": "all of them"}, "llama"),
        ({"num_labels": 10**18}, "gpt2"),
    ],
)
def test_absurd_configs_are_refused_before_memory_is_touched(changes: dict, family: str, tmp_path) -> None:
    tiny_hf(family).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError):
        headtrace.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "family", "reason"),
    [
        ({"embd_pdrop": 1e9}, "gpt2", "does not run|dropout"),
        ({"sliding_window": None}, "gemma2", "does not run: .*sliding_window"),
        ({"query_pre_attn_scalar": -1}, "gemma2", "does not run"),
        ({"rms_norm_eps": float("nan")}, "llama", "not finite"),
    ],
)
def test_a_config_of_the_right_sizes_that_does_not_run_is_refused(
    changes: dict, family: str, reason: str, tmp_path
) -> None:
    tiny_hf(family).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError, match=reason):
        headtrace.load(tmp_path)


def test_a_config_that_asks_for_tuples_makes_no_difference(folder) -> None:
    expected = headtrace.load(folder).record([3, 4]).logits
    change_config(folder, return_dict=False)
    assert torch.equal(headtrace.load(folder).record([3, 4]).logits, expected)


def test_a_model_too_large_for_memory_stops_before_it_is_read(folder, monkeypatch) -> None:
    monkeypatch.setattr("headtrace.models.checkpoint.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"needs about .* in float64, and 1 KB is available"):
        headtrace.load(folder, dtype="float64")


def test_damaged_safetensors_are_named(folder, capsys) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    damaged = [
        b"",
        whole[:4],
        whole[: 8 + length // 2],
        whole[:-1],
        struct.pack("<Q", 2**63) + whole[8:],
        struct.pack("<Q", length - 1) + whole[8:],
        whole[:8] + b"x" + whole[9:],
        whole + b"more",
    ]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"model\.safetensors' cannot be read"):
            headtrace.load(folder)
    with pytest.raises(SystemExit) as ended:
        main(["info", str(folder)])
    assert ended.value.code == 2


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"tokenizer_class": 3}']
)
def test_a_damaged_tokenizer_is_an_error_unless_another_is_given(file: str, content: bytes, tmp_path) -> None:
    source = Path(headtrace.builtin.folder())
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tokenizer = headtrace.load(tmp_path).tokenizer
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=r"The tokenizer in .* cannot be read.*tokenizer="):
        headtrace.load(tmp_path)
    assert headtrace.load(tmp_path, tokenizer=tokenizer).tokenizer is tokenizer
