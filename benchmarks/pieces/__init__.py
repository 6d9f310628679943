"""What several benchmarks share. Each benchmark is one file beside this folder and one command."""
