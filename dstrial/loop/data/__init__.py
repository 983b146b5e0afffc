"""What a trial trains and validates on: order, position, records."""
