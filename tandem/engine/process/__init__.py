"""An engine in a process of its own: the caller's side, the engine's side, and what passes between them."""
