"""The site: `make docs` builds every page of the checkout, links as on any viewer of Markdown, into build/docs."""

from __future__ import annotations

import re
from typing import Any

from kvsim import __version__ as release

project = "kvsim"
copyright = "the authors of kvsim, Apache-2.0"
version = release

extensions = ["myst_nb"]
myst_heading_anchors = 4
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/*.ipynb",
    "README*.md",
    "CONTRIBUTING.md",
    "analyses/README.md",
    "analyses/*/README.md",
    "traces/README.md",
    "changes/README.md",
]
exclude_patterns = [".*", "build", "kvsim", "tests"]
nb_execution_mode = "force"  # a notebook is run when the site is built, in a folder that does not stay
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
highlight_language = "none"  # indented blocks are commands and their output; fences name theirs

html_theme = "furo"
html_title = f"kvsim {release}"
html_static_path = ["site/style.css"]
html_css_files = ["style.css"]
html_extra_path = ["site/index.html"]  # index.html, which leads to the first page
html_copy_source = False


def toctrees(index: str) -> str:
    """The side bar, from the index page: a list for each of its headings, of the pages that its table or list links to."""
    found = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^[|*] \[([^\]]+)\]\(([^)#]+\.(?:md|ipynb))\)", section, re.MULTILINE)
        if pages:
            listed = "\n".join(f"{title} <{path}>" for title, path in pages)
            found.append(f"```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n{listed}\n```\n")
    return "\n".join(found)


def setup(app: Any) -> None:
    def with_side_bar(app: Any, page: str, source: list[str]) -> None:
        if page == root_doc:
            source[0] += "\n\n" + toctrees(source[0])
        elif page == "analyses/README":  # its table leads to a page for each question
            source[0] += "\n\n" + toctrees("\n## Questions\n" + source[0])

    app.connect("source-read", with_side_bar)
