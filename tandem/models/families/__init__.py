"""Model families: what a Hugging Face configuration and its weight names mean to us."""
