"""A checkpoint directory: its manifest, its verified files, its completion mark.

Pure file handling on the standard library: it knows neither engines nor trials, and imports no torch.
"""
