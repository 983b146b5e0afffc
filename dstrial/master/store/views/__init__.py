"""What is only read, of rows of several kinds: lists, searches, overviews."""
