"""A file tree that is not this system, such as an unpacked image: its GPU code."""
