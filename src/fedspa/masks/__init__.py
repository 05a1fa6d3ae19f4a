"""Mask searchers: they choose and change the masks of the clients' sparse models."""
