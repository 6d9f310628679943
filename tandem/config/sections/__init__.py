"""One file, one TOML table, one flag prefix, one documentation page."""
