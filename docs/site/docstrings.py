"""Docstrings as the site shows them: examples that run (``>>>``) become blocks of code."""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


def shown(text: str) -> str:
    """A docstring whose examples are fenced.

    >>> print(shown("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nThat is all.").replace("`", "'"))
    Adds.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    <BLANKLINE>
    That is all.
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(_fenced(each) if _is_example(each) else each for each in paragraphs)


def _is_example(paragraph: str) -> bool:
    return paragraph.lstrip().startswith(">>> ")


def _fenced(paragraph: str) -> str:
    return f"```pycon\n{textwrap.dedent(paragraph).strip()}\n```"


class Examples(griffe.Extension):
    """Fences the examples of every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)
