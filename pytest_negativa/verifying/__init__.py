"""A plan put to the test: rounds on copies, evidence, the verdict, and healing."""
