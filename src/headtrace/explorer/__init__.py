"""The explorer: circuits, networks and atlases as pages that open anywhere, and a local server to explore a model live.

``page.py`` writes the HTML files of circuits and networks, ``atlas_pages.py`` those of an atlas, from the modules in
``page/`` and ``atlas/``. ``panels/`` computes what the live explorer shows,
``server/`` serves it, and ``app/`` is its page.
"""

from headtrace.explorer.atlas_pages import write_atlas_pages
from headtrace.explorer.page import page, write_page

__all__ = ["page", "write_atlas_pages", "write_page"]
