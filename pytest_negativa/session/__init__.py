"""What each process of a traced or verified pytest session does."""
