"""One library to a smaller file in which every remaining byte keeps its address."""
