"""The scheduler: assign slots; reconcile processes and files with the database."""
