"""A hook of MkDocs: on the page of the paper, the source of each function that a line names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.structure.pages import Page

SOURCE = Path(__file__).resolve().parents[2] / "src"
NAMED = re.compile(r"^`(fedspa\.[\w.]+)`$", re.MULTILINE)
"""A line that holds nothing but the name of a function or class."""


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put the source below each such line, and a link to the reference in it."""
    return NAMED.sub(_with_source, markdown) if page.file.src_uri == "paper.md" else markdown


def _with_source(found: re.Match[str]) -> str:
    name, code = found[1], source_of(found[1])
    private = name.rpartition(".")[2].startswith("_")  # the reference leaves it out
    title = f"`{name}`" if private else f"[`{name}`][{name}]"
    return title + (f"\n\n```python\n{code}\n```" if code else "")


def source_of(name: str) -> str:
    """The statements of a function without its docstring; "" for a class or module."""
    parts = name.split(".")
    length = max(i for i in range(len(parts)) if SOURCE.joinpath(*parts[:i]).with_suffix(".py").is_file())
    text = SOURCE.joinpath(*parts[:length]).with_suffix(".py").read_text()
    node: ast.Module | ast.ClassDef | ast.FunctionDef = ast.parse(text)
    for part in parts[length:]:
        (node,) = (
            child
            for child in node.body
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
        )
    if not isinstance(node, ast.FunctionDef):
        return ""
    first = node.body[1 if ast.get_docstring(node) else 0]
    lines = text.splitlines()[first.lineno - 1 : node.end_lineno]
    return "\n".join(line[first.col_offset :] for line in lines)
