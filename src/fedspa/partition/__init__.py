"""How the training rows are dealt to the clients: one file a partition."""
