"""One file, one family of methods, one record for each method."""
