"""Identify this process's rank; set up rendezvous and communication between ranks."""
