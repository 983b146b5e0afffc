"""What checks have ranks run: small real models on real text, through dstrial's public names."""
