"""Implementations by platform."""
