"""Tasks in, groups of finished episodes out."""
