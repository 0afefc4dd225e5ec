"""The work of each process of a traced or verified pytest session."""
