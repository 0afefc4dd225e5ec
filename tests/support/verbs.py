"""The verbs with which help texts may begin."""

from __future__ import annotations

# In the imperative; a new one goes in here.
VERBS = frozenset(
    ("Analyse", "Call", "Check", "Compare", "Count", "Delete", "Deselect", "Do", "Drop", "End",
     "Evict", "Fail", "Find", "Heal", "Ignore", "Keep", "Leave", "List", "Lock", "Make", "Measure",
     "Overwrite", "Plan", "Print", "Process", "Put", "Read", "Record", "Remove", "Replay",
     "Report", "Rerun", "Run", "Sample", "Search", "Select", "Set", "Show", "Start", "Strip",
     "Take", "Tell", "Trace", "Use", "Verify", "Widen", "Write")
)  # fmt: skip
