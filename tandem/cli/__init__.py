"""The command line: parse, call app, print."""
