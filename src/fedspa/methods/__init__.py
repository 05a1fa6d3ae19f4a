"""Federated methods, one a file. A method gets its state as an argument and returns the new one. It knows no config,
no files and no loop over rounds."""
