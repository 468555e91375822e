"""Programs compiled ahead of time for accelerators that are not there, and what they cost."""
