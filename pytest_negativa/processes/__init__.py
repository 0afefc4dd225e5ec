"""Programs: started, redirected, watched and ended."""
