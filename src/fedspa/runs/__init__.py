"""A run from its plan to its results: assembly, processes, signals."""
