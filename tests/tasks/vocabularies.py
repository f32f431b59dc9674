"""Tokenizers of the common kinds, trained on the spot: byte-level BPE (GPT-2), metaspace with BOS (Llama)."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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


def gpt2_like() -> PreTrainedTokenizerFast:
    """Byte-level BPE, a leading space inside the token, two digits together, no special tokens added."""
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_regex(r" ?\d\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _train(tokenizer, ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet())
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
