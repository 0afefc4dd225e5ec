"""Plans to new files: what is to be written (``Edits``), and the writing. Takes no decision."""
