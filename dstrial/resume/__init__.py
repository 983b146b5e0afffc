"""May this run go on here, and how: its checkpoint, what that says, the rules."""
