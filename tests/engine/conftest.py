"""Lets the tests of every room below import what is shared here: models and programs on ranks."""
