"""The embedded master: serves Determined's REST API on one machine."""
