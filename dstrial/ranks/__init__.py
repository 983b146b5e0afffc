"""Rank identity, rendezvous and communication between the ranks of a job."""
