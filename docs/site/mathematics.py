r"""Mathematics as MathML, made when the site is built: no script, no font, and it can be read aloud.

``$x$`` stands in a line and ``$$x$$`` on its own, as on GitHub. A formula that cannot be read is a warning, which a
strict build makes an error.

>>> mathml(r"\sigma_k", display=False)[:24]
'<math xmlns="http://www.'
"""

from __future__ import annotations

import logging
import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks.mathematics")
# What pymdownx.arithmatex leaves behind where it found a formula.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>',
    re.DOTALL,
)


_FRACTION = "{http://www.w3.org/1998/Math/MathML}mfrac"
_COMMAND = re.compile(r"<m\w+[^>]*>\\\w+</m\w+>")


def mathml(latex: str, display: bool) -> str:
    """A formula as MathML. What the converter does not know it passes on as text, which is an error here."""
    made = convert(latex.strip(), display="block" if display else "inline")
    unknown = _COMMAND.search(made)
    if unknown:
        raise ValueError(f"unknown command in {unknown[0]}")
    if any(len(each) != 2 for each in ElementTree.fromstring(made).iter(_FRACTION)):
        raise ValueError("a fraction without its lower part")
    return made


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    def made(found: re.Match[str]) -> str:
        latex, display = unescape(found["latex"]), found["kind"] == "["
        try:
            formula = mathml(latex, display)
        except Exception as error:  # whatever the converter makes of it, the author has to mend it
            log.warning("%s: the formula %r cannot be read (%r)", page.file.src_uri, latex.strip(), error)
            return found[0]
        return f'<div class="formula">{formula}</div>' if display else formula

    return _FORMULA.sub(made, html)
