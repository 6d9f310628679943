"""Model definitions, one for training and inference, and how weights get in and out of them."""
