"""Where events go besides the log: one file each."""
