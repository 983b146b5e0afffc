"""Check the experiment config, section by section, and complete it for a master."""
