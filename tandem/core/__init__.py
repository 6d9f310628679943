"""What everything is made of: types, events, errors, protocols. Standard library and msgspec only."""
