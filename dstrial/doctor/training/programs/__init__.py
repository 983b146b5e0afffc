"""What ranks of checks run: small real models on text, through the public API."""
