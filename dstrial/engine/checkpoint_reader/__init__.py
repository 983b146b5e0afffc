"""Read engines' state from checkpoint files without executing code in pickles."""
