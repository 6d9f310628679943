"""Messages and tokens."""
