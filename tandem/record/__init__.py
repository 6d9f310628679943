"""The memory of a run: events, blobs, metrics, replay."""
