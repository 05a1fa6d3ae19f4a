"""Data sets: their sources, the rows of each client, and batches."""
