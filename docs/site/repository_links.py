"""Links from a page to files of the repository that are not part of the site.

On GitHub such a link opens the file. The site is a folder of its own, which has no such file, so there the link becomes
its text and the path. A path that does not exist is a warning, like any other broken link.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

log = logging.getLogger("mkdocs.hooks.repository_links")
_LINK = re.compile(
    r"(?<!!)\[(?P<text>[^\]\[]*)\]\(\s*(?P<target>(?:\.\./)+[^)\s#]+)(?P<anchor>#[^)\s]*)?\s*\)"
)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    root = Path(config.config_file_path).parent
    folder = PurePosixPath(Path(config.docs_dir).name) / PurePosixPath(page.file.src_uri).parent

    def told(link: re.Match[str]) -> str:
        path = normpath(str(folder / link["target"]))
        if path.startswith(f"{Path(config.docs_dir).name}/"):
            return link[0]
        if path.startswith("..") or not (root / path).exists():
            log.warning(
                "%s links to %s, which the repository does not have", page.file.src_uri, link["target"]
            )
        text = link["text"].strip()
        return f"`{path}`" if text.strip("`") in (path, PurePosixPath(path).name) else f"{text} (`{path}`)"

    return _LINK.sub(told, markdown)
