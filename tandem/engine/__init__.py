"""Tensors live here: inference, training, weights."""
