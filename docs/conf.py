"""Configuration of the documentation site. Build: ``sphinx-build -W -b html docs build/docs``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

import mpool  # noqa: E402 - the installed package: the reference is made from it

project = "mpool"
author = "the mpool authors"
copyright = "the mpool authors"  # noqa: A001 - Sphinx's own name
release = version = mpool.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "mpool_reference",
              "search_terms"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

smartquotes = False  # `--option` stays as it is typed

html_theme = "furo"
html_title = f"mpool {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_show_sourcelink = False

autodoc_typehints = "description"  # signatures have up to 50 parameters: the types stand beside their descriptions
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
nitpicky = True  # a role that names nothing is a warning
nitpick_ignore_regex = [  # types of other libraries, whose inventories a build without network cannot read
    ("py:class", r"(os|collections\.abc|np|types|asyncio)\.\w+|NDArray|ArrayLike|Image"),
    # Types that callers get, or fulfil, and need not name.
    ("py:class", r"_Ragged|CaptureLike|Input|ModelDescription|Tokenizer|Reference|mpool\._core\.Registry"
                 r"|mpool\.(models|host|runtime)\..*"),
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "Sources")]

# Copy what a reader types, without prompts and output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
