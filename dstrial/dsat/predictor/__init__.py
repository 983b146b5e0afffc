"""Predicts time and memory of trials from dry runs, and proposes what to measure."""
