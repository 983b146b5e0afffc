"""The embedded master: one machine's server of Determined's protocol."""
