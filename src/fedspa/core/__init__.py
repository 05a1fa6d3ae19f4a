"""What every other package speaks of: one client in one round, as its method sees it."""
