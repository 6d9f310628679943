"""HTTP faces over the protocols: what other programs talk to."""
