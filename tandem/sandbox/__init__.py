"""Isolated computers: boxes that run commands, with hard limits, and die with their owner."""
