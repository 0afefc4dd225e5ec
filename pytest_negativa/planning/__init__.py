"""A library's map and the run's usage to a plan, and a plan to a lock. No I/O."""
