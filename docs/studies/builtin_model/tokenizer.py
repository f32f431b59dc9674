"""The word-level tokenizer of the built-in model.

A word, a punctuation mark or two digits are one token; "Mary" is the same token with or without a space
before it. Decoding puts the spaces back: words are apart, punctuation and the second half of a year are not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docs.studies.builtin_model.text import AGAIN, NAME_TAG, NEW

from headtrace.tasks import facts, greater_than, ioi, pronoun
from headtrace.tasks.words import (
    CAPITALS,
    CONTINENTS,
    EVENTS,
    JOBS,
    LANGUAGES,
    NAMES,
    OBJECTS,
    PLACES,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|unknown|>", "<|endoftext|>")
# Words keep their apostrophes ("isn't"); digits go in pairs, so that a year is a century and a year of it.
TOKEN = r"\d\d|\d|[^\W\d]+(?:'[^\W\d]+)*|[^\w\s]"


def words() -> tuple[str, ...]:
    """Every word of the tasks, in a fixed order."""
    forms = [*ioi.FORMS, *greater_than.FORMS, *pronoun.FORMS, NAME_TAG]
    forms += [form for relation in facts.FORMS.values() for form in relation]
    plain = " ".join(re.sub(r"\{\w+\}", " ", form) for form in forms)
    fillers = [
        *NAMES,
        *PLACES,
        *OBJECTS,
        *EVENTS,
        *JOBS,
        *(each.strip() for each in pronoun.PRONOUNS.values()),
    ]
    for relation in (CAPITALS, LANGUAGES, CONTINENTS):
        fillers += [word for pair in relation.items() for word in pair]
    found = [".", ",", NEW, AGAIN, *re.findall(TOKEN, plain), *greater_than.YEARS, *fillers]
    return tuple(dict.fromkeys(found))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, made from scratch."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pad, unknown, end = SPECIAL
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    # A typographic apostrophe is an apostrophe.
    tokenizer.normalizer = normalizers.Replace("\u2019", "'")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(  # pyright: ignore[reportAttributeAccessIssue]
        Regex(TOKEN), behavior="removed", invert=True
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[.,])"), ""),
            decoders.Replace(Regex(r"(?<=\d\d) (?=\d\d)"), ""),
        ]
    )
    # A text begins with a token of its own, so that heads have a place to rest.
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{end} $A", special_tokens=[(end, vocabulary[end])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        eos_token=end,
        bos_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
