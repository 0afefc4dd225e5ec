"""The GPU code in a file tree that is not this system, such as an unpacked image."""
