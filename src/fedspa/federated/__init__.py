"""The federated loop and everything that happens in a round."""
