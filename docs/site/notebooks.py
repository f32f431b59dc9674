"""Notebooks as pages, with the outputs that are kept in them. Nothing is run.

``notebooks/toy.ipynb`` becomes the page ``notebooks/toy.md`` with its pictures beside it; the notebook itself stays in
the site, to be fetched and run. Links to a notebook lead to its page, and a badge from the network is its text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from mkdocs.structure.files import File

_FETCH = "[The notebook itself]({name}), to be run.\n"
_BADGE = re.compile(r"!\[([^\]]*)\]\(https?://[^)]*\)")
_LINK = re.compile(r"(?P<before>\]\((?:[^)\s]*/)?)(?P<name>[\w-]+)\.ipynb(?P<anchor>#[^)\s]*)?\)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def as_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook in Markdown, and its pictures by file name."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(_BADGE.sub(r"\1", source))
        elif cell["cell_type"] == "code" and source:
            parts.append(f"```python\n{source}\n```")
            said = _said(notebook["cells"], cell)
            parts += [part for output in cell["outputs"] for part in _output(output, name, pictures, said)]
    first, *rest = parts
    return "\n\n".join([first, _FETCH.format(name=f"{name}.ipynb"), *rest]) + "\n", pictures


def _said(cells: list[dict[str, Any]], cell: dict[str, Any]) -> str:
    """The text of the picture of a cell: the paragraph of text that stands before it."""
    before = cells[: cells.index(cell)]
    texts = ["".join(each["source"]) for each in before if each["cell_type"] == "markdown"]
    paragraph = texts[-1].strip().split("\n\n")[-1] if texts else "What the cell above draws"
    return " ".join(re.sub(r"[\[\]`*#]", "", paragraph).split())


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes], said: str) -> Iterator[str]:
    if output["output_type"] == "stream" and output["name"] == "stdout":
        yield _text("".join(output["text"]))
    data = output.get("data", {})
    if "image/png" in data:
        picture = f"{name}-{len(pictures) + 1}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        yield f"![{said}]({picture})"
    elif "text/markdown" in data:
        yield "".join(data["text/markdown"])
    elif "text/plain" in data:
        yield _text("".join(data["text/plain"]))


def _text(text: str) -> str:
    return f"```text\n{_COLOURS.sub('', text).rstrip()}\n```"


def on_files(files: Any, config: Any) -> Any:
    for file in [each for each in files if each.src_uri.endswith(".ipynb")]:
        path = PurePosixPath(file.src_uri)
        markdown, pictures = as_page(json.loads(file.content_string), path.stem)
        files.append(File.generated(config, str(path.with_suffix(".md")), content=markdown))
        for picture, content in pictures.items():
            files.append(File.generated(config, str(path.parent / picture), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    def to_page(link: re.Match[str]) -> str:
        own = PurePosixPath(page.file.src_uri).stem == link["name"]
        return link[0] if own else f"{link['before']}{link['name']}.md{link['anchor'] or ''})"

    return _LINK.sub(to_page, markdown)
