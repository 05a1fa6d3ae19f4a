"""The federated loop, and the parts of a round."""
