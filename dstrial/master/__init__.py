"""The master: a process that serves Determined's REST API and schedules trials."""
