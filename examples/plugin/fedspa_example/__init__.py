"""A plug-in of fedspa: copy this folder, and rename the package in it and in pyproject.toml."""
