"""Makes rows true: assigns slots, runs processes, takes in output, deletes files."""
