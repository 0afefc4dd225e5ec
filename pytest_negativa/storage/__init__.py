"""Everything of ours on disk: the run folder, records, locks, outcomes."""
