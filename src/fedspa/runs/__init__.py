"""Carries a run out: assembly, processes, signals."""
