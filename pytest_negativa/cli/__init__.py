"""The command ``negativa``: parses, calls, prints."""
