"""Groups in, weight versions out: decides what is trained; the engine computes it."""
