"""Pages of libraries: traced, armed, and brought back to where they left."""
