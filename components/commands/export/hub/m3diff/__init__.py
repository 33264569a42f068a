"""M3Diff as others load it."""
