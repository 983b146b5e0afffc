"""One module per check: its docstring says what it shows and what it cannot show on CPU ranks."""
