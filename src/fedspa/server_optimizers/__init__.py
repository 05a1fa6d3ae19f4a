"""Server optimizers: how the server moves its weights by the mean update of a round."""
