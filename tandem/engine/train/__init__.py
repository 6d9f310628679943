"""Training: plans of samples to tensors, loss, gradients, optimizer, checkpoints."""
