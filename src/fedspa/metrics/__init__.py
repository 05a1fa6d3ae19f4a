"""Metrics on each client's test set, one a file."""
