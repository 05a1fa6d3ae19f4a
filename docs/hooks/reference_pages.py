"""A hook of MkDocs: the API reference, one page for each package of fedspa, built from the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspa"


def headline(file: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `reference/index.md` and a page for each package of fedspa to the last part of the navigation."""
    rows = ["| package | |", "|---|---|"]
    pages: list[str | dict[str, str]] = ["reference/index.md"]
    for init in [SOURCE / "__init__.py", *sorted(SOURCE.glob("*/__init__.py"))]:
        name = "fedspa" if init.parent == SOURCE else f"fedspa.{init.parent.name}"
        modules = sorted(file for file in init.parent.glob("*.py") if file != init)
        content = f"# {name}\n\n{headline(init)}\n\n"
        for module in modules:
            content += (
                f"## {name}.{module.stem}\n\n::: {name}.{module.stem}\n    options: {{heading_level: 3}}\n\n"
            )
        files.append(File.generated(config, f"reference/{name}.md", content=content))
        rows.append(f"| [{name}]({name}.md) | {headline(init)} |")
        pages.append({name: f"reference/{name}.md"})
    index = "# Reference\n\nEvery public class and function, from the docstrings.\n\n" + "\n".join(rows)
    files.append(File.generated(config, "reference/index.md", content=index + "\n"))
    assert config.nav
    config.nav[-1]["Reference"].extend(pages)
    return files
