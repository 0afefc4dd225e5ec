"""Pages that left a library: formats, the code that maps them, and a log of what is touched."""
