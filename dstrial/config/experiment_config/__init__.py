"""The experiment config: its sections, their checks, and how it is submitted."""
