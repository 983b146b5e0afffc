"""A function per check says what it shows, and what it cannot show on CPU ranks."""
