"""The verbs with which help texts may begin."""

from __future__ import annotations

# In the imperative; a new one goes in here.
VERBS = frozenset(
    ("Analyse", "Call", "Check", "Compare", "Count", "Delete", "Deselect", "Do", "Drop", "End",
     "Evict", "Fail", "Fetch", "Find", "Heal", "Ignore", "Keep", "Leave", "List", "Lock",
     "Make", "Measure", "Overwrite", "Plan", "Print", "Process", "Put", "Read", "Record",
     "Remove", "Replay", "Report", "Rerun", "Run", "Sample", "Search", "Select", "Send", "Set",
     "Show", "Start", "State", "Strip", "Take", "Tell", "Trace", "Use", "Verify", "Widen",
     "Write")
)  # fmt: skip
