"""Find ranks that make no progress, name the straggler, restart them if asked."""
