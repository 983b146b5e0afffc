"""Backends, which run a search's trials on this machine or on a Determined master."""
