"""Names for what the theme leaves unnamed: the search dialog, and sections of the navigation that are pages."""

from __future__ import annotations

import re
from typing import Any

_SEARCH = 'data-md-component="search" role="dialog"'
_SECTION = re.compile(
    r'(?P<title><span class="md-ellipsis">\s*(?P<name>[^<]*?)\s*</span>\s*</a>\s*)'
    r'<label (?P<rest>[^>]*id="__nav_[0-9_]+_label")'
)


def named(html: str) -> str:
    """A page whose search dialog and sections say what they are.

    >>> named('<div data-md-component="search" role="dialog">')
    '<div data-md-component="search" role="dialog" aria-label="Search">'
    >>> named('<span class="md-ellipsis"> Files </span></a><label for="a" id="__nav_5_label">')
    '<span class="md-ellipsis"> Files </span></a><label aria-label="Files" for="a" id="__nav_5_label">'
    """
    html = html.replace(_SEARCH, f'{_SEARCH} aria-label="Search"')
    return _SECTION.sub(r'\g<title><label aria-label="\g<name>" \g<rest>', html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    return named(output)
