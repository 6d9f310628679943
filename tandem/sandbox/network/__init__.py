"""What a box may reach, and the host's proxy that lets it: the only way out of a box."""
