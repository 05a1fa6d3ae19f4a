"""Server optimizers: they change the global weights by the mean update of a round."""
