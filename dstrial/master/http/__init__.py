"""The master's front door: who may connect, send how much, and for how long."""
