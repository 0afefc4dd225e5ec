"""CPU code by pages: what processes touched, what it adds up to, and what it means."""
