"""How well a model does on each client's test set: one file a metric."""
