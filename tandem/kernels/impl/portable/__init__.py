"""Kernels in PyTorch's own operations: for every device that has no kernels of ours."""
