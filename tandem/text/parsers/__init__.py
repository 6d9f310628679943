"""Tool-call formats: one file each."""
