"""The search space: settings to vary, with their legal and useful values."""
