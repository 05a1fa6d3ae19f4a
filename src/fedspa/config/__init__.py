"""Turns the composed config into a checked plan."""
