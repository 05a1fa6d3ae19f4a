"""Engines: what computes the work that visits ask for. One file each; eager is the reference for the others."""
