"""Ways to isolate a box; each implements the contract of ``tandem.sandbox.backend``."""
