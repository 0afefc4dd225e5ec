"""The GPU code in files that are not installed here: file trees, archives, container images."""
