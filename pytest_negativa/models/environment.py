"""Environment variables by which the processes of a run find each other's files.

The plugin imports this module in every pytest session, so the module imports nothing.
"""

ROUND_VARIABLE = "NEGATIVA_ROUND"
"""Names, to a program under proof, the round file, which tells it what to do."""
