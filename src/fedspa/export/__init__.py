"""Exports one client's model of a finished run to a file, for programs that do not know fedspa."""
