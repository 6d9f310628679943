"""Environments that come with Tandem."""
