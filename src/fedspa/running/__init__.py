"""A run: how its processes start, share the work, are interrupted, and end."""
