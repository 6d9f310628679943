"""Images and templates: from a registry, an archive or a Dockerfile to the layers that boxes start from."""
