"""Images as figures with a caption.

An image that is a paragraph of its own becomes a figure. Its caption is the paragraph below it, where that is
emphasised as a whole (``*What it shows.*``, which reads as a caption on GitHub as well), and otherwise the image's
own text.
"""

from __future__ import annotations

import re
from typing import Any

_FIGURE = re.compile(
    r"<p>\s*(?P<image><img [^>]*>)\s*(?:</p>\s*<p>)?(?:\s*<em>(?P<caption>(?:(?!</p>|</em>).)*)</em>)?\s*</p>",
    re.DOTALL,
)
_TEXT = re.compile(r'\balt="([^"]*)"')


def captioned(html: str) -> str:
    """HTML whose single images are figures.

    >>> captioned('<p><img alt="Two heads" src="a.png"></p>')
    '<figure><img loading="lazy" alt="Two heads" src="a.png"><figcaption>Two heads</figcaption></figure>'
    >>> captioned('<p><img alt="Two heads" src="a.png"></p> <p><em>What they read.</em></p>')
    '<figure><img loading="lazy" alt="Two heads" src="a.png"><figcaption>What they read.</figcaption></figure>'
    """

    def figure(found: re.Match[str]) -> str:
        text = _TEXT.search(found["image"])
        caption = found["caption"] or (text[1] if text else "")
        image = found["image"].replace("<img ", '<img loading="lazy" ', 1)
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"

    return _FIGURE.sub(figure, html)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return captioned(html)
