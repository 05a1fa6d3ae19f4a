"""Sweeps: which runs a study has, and where they run."""
