"""The self-contained HTML pages: what they have in common, and how one is made."""

from meshwright.pages.page import render

__all__ = ["render"]
