"""The E2B-compatible face of the sandbox manager: control plane, in-box services and ports, all on one port."""
