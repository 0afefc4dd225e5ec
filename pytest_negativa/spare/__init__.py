"""Pages that left a library and come back when they are touched: formats, and the runtime."""
