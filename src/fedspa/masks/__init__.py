"""Masks over the flat weights: what a client's sparse model is cut out by, and how the next cut is found."""
