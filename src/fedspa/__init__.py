"""fedspa: personalised federated learning in which every client trains a sparse model of its own."""

__version__ = "0.1.0"
