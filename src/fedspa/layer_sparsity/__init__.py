"""How a network's budget of active parameters is shared out among its tensors: one file a rule."""
