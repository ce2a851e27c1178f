"""How the manual is built: ``sphinx-build -W -b html docs docs/_build/html``. Nothing is fetched."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinxcontrib import mermaid

project = "streamoff"
author = "the streamoff contributors"
with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
    release = version = tomllib.load(file)["project"]["version"]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "streamoff"
html_static_path = ["_static"]
html_css_files = ["streamoff.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False


def _draw_from_our_copy(app: Sphinx, *page: object) -> None:
    """Load the diagram script on pages that have diagrams, from beside the page."""
    doctree = page[-1]
    if isinstance(doctree, nodes.document) and doctree.next_node(mermaid.mermaid) is not None:
        app.add_js_file("mermaid.min.js")
        app.add_js_file("diagrams.js")


def setup(app: Sphinx) -> None:
    """Replace the extension's way of loading its script, which asks the network."""
    for listener in app.events.listeners["html-page-context"][:]:
        if listener.handler is mermaid.install_js:
            app.disconnect(listener.id)
    app.connect("html-page-context", _draw_from_our_copy)
