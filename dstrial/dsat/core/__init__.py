"""What a search is about: candidates, results of trials, and the record of both."""
