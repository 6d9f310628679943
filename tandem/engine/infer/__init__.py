"""Inference: token ids in, token ids out. Planning (request, kv_cache, seats, scheduler) knows no tensors."""
