"""Layer sparsity: rules that divide a network's budget of active parameters among its tensors, one rule a file."""
