"""What a user gives (text, token ids, one prompt or many, an answer), with errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, cast

from headtrace.errors import InputError
from headtrace.prompts.encoding import (
    Encoded,
    decoded,
    encode,
    following,
    has_unknown,
    is_unknown,
    require_unicode,
)
from headtrace.prompts.forms import EMPTY, Chat, one_prompt
from headtrace.vocabulary import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts and answers for one model, in whatever form they are given, with errors that say what is wrong.

    Text gets the special tokens that the tokenizer puts in front; a conversation gets those of its chat template, and
    the beginning of the answer that the template asks for; token ids are taken as they are.
    """

    tokenizer: PreTrainedTokenizerBase | None
    name: str
    """Of the model, for errors."""
    d_vocab: int
    max_positions: int | None = None
    d_output: int | None = None
    """How many tokens answers come from, where that is not ``d_vocab``: ids there are no ids of the tokenizer's."""

    @property
    def own_outputs(self) -> bool:
        """Whether outputs have a vocabulary of their own."""
        return self.d_output not in (None, self.d_vocab)

    def ids(self, prompt: Prompt | Chat, bos: bool | None = None) -> list[int]:
        """Token ids of one prompt. Special tokens come first as the tokenizer puts them, unless ``bos`` says."""
        given = one_prompt(prompt)
        ids = self._taken(given, bos) if isinstance(given, list) else self._of_text(given, bos)
        if not ids:
            raise InputError(EMPTY)
        wrong = [token for token in ids if not 0 <= token < self.d_vocab]
        if wrong:
            raise InputError(
                f"Unknown token id {wrong[0]}: {self.name!r} has token ids 0 to {self.d_vocab - 1}. "
                "Was the prompt made with another model's tokenizer?"
            )
        if self.max_positions is not None and len(ids) > self.max_positions:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but {self.name!r} has a context of {self.max_positions}. "
                "Shorten the prompt."
            )
        return ids

    def continuation(
        self, prompt: Prompt | Chat | None, answer: str | int, what: str = "answer"
    ) -> tuple[int, ...]:
        """The tokens of an answer as it follows a prompt; a token id stands for itself.

        Behind a text or a conversation, the answer is what the longer text has more; if that would change the prompt's
        own tokens, or make the answer another token than it is alone, the user meant something else. Behind token ids
        (or no prompt) the answer is read alone.
        """
        if not isinstance(answer, str):
            return (self._checked_id(answer, what),)
        if self.own_outputs:
            raise InputError(
                f"The outputs of {self.name!r} have a vocabulary of their own ({self.d_output} tokens, its prompts "
                f"{self.d_vocab}), which no tokenizer reads: give the {what} as a number from 0 to "
                f"{(self.d_output or 1) - 1}, not as {answer!r}."
            )
        tokenizer = self._require_tokenizer(f"give the {what} as a token id.")
        require_unicode(answer)
        alone: tuple[int, ...] = tuple(cast(Any, tokenizer(answer, add_special_tokens=False))["input_ids"])
        if not alone:
            raise InputError(
                f"The {what} {answer!r} has no tokens. Give text such as ' Mary', or a token id."
            )
        found: tuple[int, ...] | None = alone
        given = None if prompt is None else one_prompt(prompt)
        if isinstance(given, (str, Chat)):
            text = self._words(given)
            own, longer = encode(tokenizer, [text, text + answer], special=isinstance(given, str))
            if not own.own:
                raise InputError(EMPTY)
            found = following(own, longer)
            if found is None or (len(alone) == 1 and found != alone):
                raise InputError(self._misfit(given, answer, what, found))
        if has_unknown(tokenizer, answer, found):
            raise InputError(
                f"The {what} {answer!r} is not in the model's vocabulary. Choose a word that it knows."
            )
        return found

    def token(self, prompt: Prompt | Chat | None, answer: str | int, what: str = "answer") -> int:
        """The token id of an answer that must be exactly one token."""
        found = self.continuation(prompt, answer, what)
        if len(found) == 1:
            return found[0]
        raise InputError(
            f"The {what} {answer!r} is {len(found)} tokens for this model: {self._pieces(found)}. "
            f"It must be one token.{_space_hint(str(answer))}"
        )

    def text(self, prompt: Prompt | Chat) -> str | None:
        """The text of a prompt: itself, or what the chat template makes of a conversation; None for token ids."""
        given = one_prompt(prompt)
        return None if isinstance(given, list) else self._words(given)

    def labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Readable text of each token; without a tokenizer, the id itself."""
        if self.tokenizer is None:
            return tuple(f"#{token}" for token in ids)
        return tuple(decoded(self.tokenizer, [token]) for token in ids)

    def output_labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Readable text of each output; its number where outputs have a vocabulary of their own."""
        return tuple(f"#{token}" for token in ids) if self.own_outputs else self.labels(ids)

    def start_tokens(self, text: str | None, ids: Sequence[int]) -> tuple[str, ...] | None:
        """Which of a prompt's tokens stand in front of its text (a ``<bos>``); None where there is no text to compare.

        >>> import headtrace
        >>> reader = headtrace.load("builtin").reader
        >>> reader.start_tokens("When Mary", reader.ids("When Mary"))
        ('<|endoftext|>',)
        """
        if text is None or self.tokenizer is None:
            return None
        own = encode(self.tokenizer, [text], special=False)[0].ids
        front = len(ids) - len(own)
        return self.labels(ids[:front]) if front >= 0 and tuple(ids[front:]) == own else None

    # -- inside ------------------------------------------------------------------------------------------------

    def _require_tokenizer(self, instead: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InputError(f"{self.name!r} was loaded without a tokenizer: {instead}")
        return self.tokenizer

    def _taken(self, ids: list[int], bos: bool | None) -> list[int]:
        if bos is not None:
            raise InputError(
                f"bos={bos} says how text is read, and this prompt is token ids, which are taken as they are. Leave "
                "bos out, and put the token in front of them (or not)."
            )
        return ids

    def _words(self, given: str | Chat) -> str:
        return given if isinstance(given, str) else self._rendered(given)

    def _rendered(self, chat: Chat) -> str:
        """A conversation as one text, up to where the answer begins."""
        tokenizer: Any = self._require_tokenizer("messages cannot be read. Give token ids.")
        for message in chat.messages:
            require_unicode(message["content"])
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"The tokenizer of {self.name!r} has no chat template, so it cannot read messages. Give text or token "
                "ids, or set model.tokenizer.chat_template."
            )
        try:
            return tokenizer.apply_chat_template(
                [dict(message) for message in chat.messages], tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # a template is a program that comes with the tokenizer: it raises what it likes
            raise InputError(
                f"The chat template of {self.name!r} refuses these messages: {error} Do the roles alternate, and does "
                "the template know them?"
            ) from error

    def _of_text(self, given: str | Chat, bos: bool | None) -> list[int]:
        tokenizer = self._require_tokenizer(
            "text cannot be read. Give token ids, or pass tokenizer= to headtrace.load."
        )
        text, special = self._words(given), isinstance(given, str)
        if not text or not (encoded := encode(tokenizer, [text], special=special)[0]).own:
            raise InputError(EMPTY)
        if has_unknown(tokenizer, text, encoded.own):
            raise InputError(
                f"The model's vocabulary does not contain {_unknown_words(tokenizer, encoded)}: the tokenizer turns it "
                f"into {tokenizer.unk_token!r}. Use words that the model knows, or give token ids."
            )
        ids = list(encoded.ids)
        if bos is None:
            return ids
        first: int | None = cast(Any, tokenizer).bos_token_id
        if bos and first is None:
            raise InputError("bos=True, but this tokenizer has no beginning-of-sequence token.")
        while ids and ids[0] == first:
            del ids[0]
        return [first, *ids] if bos and first is not None else ids

    def _checked_id(self, token: object, what: str) -> int:
        plain: object = token.tolist() if hasattr(token, "tolist") else token  # type: ignore[attr-defined]
        if not isinstance(plain, int) or isinstance(plain, bool):
            raise InputError(
                f"The {what} is text or a token id; got {brief(plain)} ({type(token).__name__})."
            )
        most = self.d_vocab if self.d_output is None else self.d_output
        if not 0 <= plain < most:
            raise InputError(f"Unknown token id {plain} as {what}: valid ids are 0 to {most - 1}.")
        return plain

    def _pieces(self, ids: Sequence[int]) -> str:
        return " + ".join(repr(label) for label in self.labels(ids))

    def _misfit(self, prompt: str | Chat, answer: str, what: str, found: tuple[int, ...] | None) -> str:
        """Why an answer is not what its user meant, right behind this prompt."""
        reason = (
            "changes how the end of the prompt is split into tokens"
            if found is None
            else f"is something else right behind this prompt than alone: {self._pieces(found)}"
        )
        if isinstance(prompt, Chat):
            hint = f" Give the {what} as a token id, or as the chat's next words begin."
        elif prompt[-1:].isspace():
            hint = f" Leave out the space at the end of the prompt, and write {' ' + answer.lstrip()!r}."
        else:
            hint = _space_hint(answer) or f" Give the {what} as a token id."
        return f"The {what} {answer!r} {reason}.{hint}"


def _unknown_words(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> str:
    """What became the unknown token, where the tokenizer keeps offsets."""
    if encoded.offsets is None:
        return "a part of the prompt"
    own = zip(encoded.own, encoded.offsets[encoded.front :], strict=True)
    words = (encoded.text[start:end] for token, (start, end) in own if is_unknown(tokenizer, token))
    return ", ".join(dict.fromkeys(map(repr, words)))


def _space_hint(answer: str) -> str:
    return "" if answer.startswith(" ") else f" Did you mean {' ' + answer!r}, with a leading space?"
