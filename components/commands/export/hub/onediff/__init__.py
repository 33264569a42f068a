"""OneDiff as others load it."""
