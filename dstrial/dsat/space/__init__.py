"""What a search may try: knobs, their legality, and which of them have effect."""
