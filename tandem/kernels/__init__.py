"""Fast operations: PyTorch references and dispatch."""
