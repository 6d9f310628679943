"""What E2B clients expect to answer inside a box: processes, files and code; it runs on the host, over box verbs."""
