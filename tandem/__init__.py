"""Tandem: post-training of language-model agents as one continuous, verifiable loop."""

__version__ = "0.1.0"
