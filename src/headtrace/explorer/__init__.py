"""The explorer: a circuit as a page that opens anywhere, and an atlas as a folder of such pages.

``page.py`` writes the HTML file of circuits, ``atlas_pages.py`` those of an atlas; ``modules.py`` puts the modules of
``page/`` and ``atlas/`` into them.
"""

from headtrace.explorer.atlas_pages import write_atlas_pages
from headtrace.explorer.page import page, write_page

__all__ = ["page", "write_atlas_pages", "write_page"]
