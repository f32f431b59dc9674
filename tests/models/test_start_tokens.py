"""Start tokens: a GGUF file is read with the tokens that transformers reads from the folder it was made of.

For each kind of tokenizer a small one is trained here, saved as a Hugging Face folder, and written into a GGUF file as
llama.cpp's converter does: vocabulary, scores or merges, kinds of tokens, and what it says of start tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import headtrace
from headtrace.models.packages import packaged_file
from tests.models.test_gguf import NAMES
from tests.tiny import tiny_hf

TEXTS = (
    "When Mary and John went to the store, John gave a drink to",
    "The war lasted from 1732 to 17",
    " spaces  before and   between",
    "camelCase and UPPER words, it's don't we'll",
)
SIZE = 420
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Mistral's Tekken splits text into words: digits one by one, words where their case changes."""
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer, and what a GGUF file says of it."""

    model: str
    pre: str
    start: bool
    split: str | None = None
    whole_words: bool = False

    def train(self) -> Tokenizer:
        special = ["<unk>", "<s>", "</s>"]
        if (
            self.model == "llama"
        ):  # SentencePiece: words begin with a mark, and bytes stand for what is unknown
            backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
            special += [f"<0x{byte:02X}>" for byte in range(256)]
            alphabet: list[str] = []
        else:
            backend = Tokenizer(models.BPE())
            split = [] if self.split is None else [pre_tokenizers.Split(Regex(self.split), "isolated")]
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
            backend.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator([text for text in TEXTS for _ in range(5)], trainer)
        if self.whole_words:
            # A word of the vocabulary that no merge leads to: Tekken takes it whole all the same.
            content = json.loads(backend.to_str())
            content["model"]["vocab"]["Ġdrink"] = content["model"]["vocab"].pop(
                "Ġdrink", len(content["model"]["vocab"])
            )
            content["model"]["merges"] = [
                pair for pair in content["model"]["merges"] if "".join(pair) != "Ġdrink"
            ]
            content["model"]["ignore_merges"] = True
            backend = Tokenizer.from_str(json.dumps(content))
        if self.start:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        return backend


KINDS = {
    "sentencepiece": Kind("llama", "default", start=True),
    "bpe": Kind("gpt2", "qwen2", start=False, split=QWEN),
    "bpe with a start token": Kind("gpt2", "gpt-2", start=True),
    "tekken": Kind("gpt2", "tekken", start=True, split=TEKKEN, whole_words=True),
}


def write(path: Path, kind: Kind, backend: Tokenizer, *, says: bool = True) -> Path:
    """The tokenizer and a small model as a GGUF file. ``says``: whether it says if it begins with a token."""
    architecture = "gemma2" if kind.model == "llama" else "llama"
    hf: Any = tiny_hf(
        "llama",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_hidden_layers=2,
        vocab_size=backend.get_vocab_size(),
    )
    if architecture == "gemma2":
        hf = tiny_hf("gemma2", num_hidden_layers=2, vocab_size=backend.get_vocab_size())
    writer = gguf.GGUFWriter(str(path), architecture)
    config = hf.config
    writer.add_block_count(2)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(64)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    content = json.loads(backend.to_str())
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    writer.add_tokenizer_model(kind.model)
    writer.add_tokenizer_pre(kind.pre)
    writer.add_token_list(tokens)
    kinds = [
        3 if token in ("<s>", "</s>") else 2 if token == "<unk>" else 6 if token.startswith("<0x") else 1
        for token in tokens
    ]
    writer.add_token_types(kinds)
    if kind.model == "llama":
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if says:
        writer.add_add_bos_token(kind.start)
    names = dict(NAMES)
    if architecture == "gemma2":
        names |= {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
        names |= {"post_feedforward_layernorm": "post_ffw_norm"}
    for key, tensor in hf.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = key
        for theirs, ours in sorted(names.items(), key=lambda pair: -len(pair[0])):
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_file_has_the_tokens_of_the_folder_it_was_made_of(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "cache"))
    kind = KINDS[name]
    backend = kind.train()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "original")
    original: Any = AutoTokenizer.from_pretrained(str(tmp_path / "original"))
    model = headtrace.load(write(tmp_path / "a.gguf", kind, backend))
    assert model.start_tokens == (("<s>",) if kind.start else ())
    for text in TEXTS:
        assert model.to_ids(text) == original(text)["input_ids"], text
    again = headtrace.load(tmp_path / "a.gguf")  # from the cache
    assert [again.to_ids(text) for text in TEXTS] == [model.to_ids(text) for text in TEXTS]


@pytest.mark.parametrize(("name", "start"), [("sentencepiece", True), ("bpe", False), ("tekken", True)])
def test_a_file_that_does_not_say_follows_its_kind(name: str, start: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path / "cache"))
    kind = KINDS[name]
    model = headtrace.load(write(tmp_path / "a.gguf", kind, kind.train(), says=False))
    assert model.start_tokens == (("<s>",) if start else ())


def test_circuits_say_which_tokens_were_put_in_front() -> None:
    model = headtrace.load("builtin")
    tracer = headtrace.Tracer(model)
    text = "When Mary and John went to the store, John gave a drink to"
    circuit = tracer.trace(text, answer=" Mary", wrong=" John")
    assert circuit.prompt.start_tokens == circuit.prompt.tokens[:1] == model.start_tokens
    ids = tracer.trace(model.to_ids(text), answer=" Mary", wrong=" John")
    assert ids.prompt.start_tokens is None  # nobody knows which of them is a start token
    without = tracer.trace(text, answer=" Mary", wrong=" John", bos=False)
    assert without.prompt.start_tokens == ()


@pytest.mark.slow
def test_gemma_answers_as_it_does_with_its_start_token() -> None:
    if packaged_file("gemma-3-270m") is None:
        pytest.skip("Gemma is not here: headtrace models get gemma-3-270m")
    model = headtrace.load("gemma-3-270m")
    recording = model.record("When Mary and John went to the store, John gave a drink to")
    assert recording.tokens()[0] == "<bos>"
    assert recording.top_answers(1)[0][0] == " Mary"
    assert recording.top_answers(1)[0][2] > 0.5
