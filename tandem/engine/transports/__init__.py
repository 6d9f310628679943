"""Movers of weights between processes: plug-ins of the kind ``transport``."""
