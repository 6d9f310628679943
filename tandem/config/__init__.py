"""One typed configuration tree."""
