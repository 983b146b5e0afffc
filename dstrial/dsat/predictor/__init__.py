"""Predicts trials: reads dry runs, predicts time and memory, proposes candidates."""
