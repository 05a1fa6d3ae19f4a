"""Predicts the costs and steps of a run before it runs."""
