"""Partitions: they divide the training rows among the clients, one a file."""
