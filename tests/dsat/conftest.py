"""Lets the tests of every room below import what is shared here: surfaces and programs of searches."""
